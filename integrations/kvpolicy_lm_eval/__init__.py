"""lm-eval for kvpolicy: the model `kvpolicy`, the task group `kvpolicy`, and how lm-eval finds them.

Imports nothing, because Python imports it at every start (see `startup`).
"""
