"""What every test shares."""

# Before pytest imports a module of the package for its doctests: it would load a second copy of that module, whose
# classes and tables are not those that the tests see.
import kvpolicy as kvpolicy
