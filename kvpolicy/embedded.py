"""The bundled model, and configs of large ones."""

from kvpolicy.hf.embedded import SHIPPED as SHIPPED
from kvpolicy.hf.embedded import as_config as as_config
from kvpolicy.hf.embedded import config_of as config_of
from kvpolicy.hf.embedded import tiny as tiny
