"""The place of the question of a prompt, which is in `kvpolicy_eval.data.modes`."""

from kvpolicy_lm_eval.data.modes import BEYOND as BEYOND
from kvpolicy_lm_eval.data.modes import MODES as MODES
from kvpolicy_lm_eval.data.modes import Mode as Mode
from kvpolicy_lm_eval.data.modes import Placed as Placed
from kvpolicy_lm_eval.data.modes import place as place
from kvpolicy_lm_eval.data.modes import second_question as second_question
