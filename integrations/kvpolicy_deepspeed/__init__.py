"""DeepSpeed for kvpolicy: a model divided over ranks, ready for `kvpolicy.attach`, and a script that ends as one."""

from kvpolicy_deepspeed.launch import ranks as ranks
from kvpolicy_deepspeed.launch import world as world
from kvpolicy_deepspeed.loading import load as load
