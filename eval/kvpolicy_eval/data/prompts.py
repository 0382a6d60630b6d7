"""Generators of prompts with answers, which are in `kvpolicy_lm_eval.data.prompts`."""

from kvpolicy_lm_eval.data.prompts import Prompt as Prompt
from kvpolicy_lm_eval.data.prompts import few_shot as few_shot
from kvpolicy_lm_eval.data.prompts import hot_keys as hot_keys
from kvpolicy_lm_eval.data.prompts import multi_query as multi_query
from kvpolicy_lm_eval.data.prompts import needles as needles
from kvpolicy_lm_eval.data.prompts import passkey as passkey
from kvpolicy_lm_eval.data.prompts import recall as recall
from kvpolicy_lm_eval.data.prompts import rings as rings
from kvpolicy_lm_eval.data.prompts import split as split
