"""Serve with vLLM what kvpolicy compresses: documents, and every long prompt. A connector, prompts, and middlewares."""

from kvpolicy_vllm.compress import Compress as Compress
from kvpolicy_vllm.documents import Document as Document
from kvpolicy_vllm.documents import read_document as read_document
from kvpolicy_vllm.middleware import Documents as Documents
from kvpolicy_vllm.prompts import prompt as prompt
