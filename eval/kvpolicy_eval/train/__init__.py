"""Train the embedded model, a small Llama, from nothing on one CPU thread.

Run `python -m kvpolicy_eval.train --out DIR`.
"""
