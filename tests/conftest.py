"""What every test shares."""

import torch

# Before pytest imports a module of the package for its doctests: it would load a second copy of that module, whose
# classes and tables are not those that the tests see.
from kvpolicy import registry

for name in registry.names():
    registry.lookup(name)

torch.set_num_threads(1)  # tiny tensors: more threads only wait for each other
