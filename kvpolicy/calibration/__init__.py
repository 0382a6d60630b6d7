"""Calibration: parameters that codecs and readers need for a model, learned from its keys and values."""

from kvpolicy.calibration.channels import calibrate_channels as calibrate_channels
from kvpolicy.calibration.collect import Samples as Samples
from kvpolicy.calibration.collect import collect as collect
from kvpolicy.calibration.corpus import read_texts as read_texts
from kvpolicy.calibration.corpus import token_windows as token_windows
from kvpolicy.calibration.csr import Dictionaries as Dictionaries
from kvpolicy.calibration.csr import calibrate_csr as calibrate_csr
from kvpolicy.calibration.dictionary import Training as Training
from kvpolicy.calibration.identity import identity as identity
from kvpolicy.calibration.identity import model_info as model_info
from kvpolicy.calibration.kvquant import fit_kvquant as fit_kvquant
from kvpolicy.calibration.levels import calibrate_kvquant as calibrate_kvquant
