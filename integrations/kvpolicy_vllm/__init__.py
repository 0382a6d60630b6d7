"""Serve documents that kvpolicy has compressed with vLLM: a connector, prompts, and a middleware for chat."""

from kvpolicy_vllm.documents import Document as Document
from kvpolicy_vllm.documents import read_document as read_document
from kvpolicy_vllm.middleware import Documents as Documents
from kvpolicy_vllm.prompts import prompt as prompt
