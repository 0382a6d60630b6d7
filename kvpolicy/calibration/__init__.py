"""Calibration: what parts of a policy need to know of a model, learned from its keys, values and queries."""

from kvpolicy.calibration.channels import calibrate_channels as calibrate_channels
from kvpolicy.calibration.collect import Samples as Samples
from kvpolicy.calibration.collect import collect as collect
from kvpolicy.calibration.corpus import read_texts as read_texts
from kvpolicy.calibration.corpus import token_windows as token_windows
from kvpolicy.calibration.csr import calibrate_csr as calibrate_csr
from kvpolicy.calibration.csr_options import Dictionaries as Dictionaries
from kvpolicy.calibration.dictionary import Training as Training
from kvpolicy.calibration.echoes import EchoScores as EchoScores
from kvpolicy.calibration.echoes import calibrate_echoes as calibrate_echoes
from kvpolicy.calibration.echoes import echo_scores as echo_scores
from kvpolicy.calibration.echoes import ranked_scores as ranked_scores
from kvpolicy.calibration.estimate import estimate_csr as estimate_csr
from kvpolicy.calibration.gate import calibrate_gate as calibrate_gate
from kvpolicy.calibration.heads import calibrate_heads as calibrate_heads
from kvpolicy.calibration.heads import head_scores as head_scores
from kvpolicy.calibration.kvquant import fit_kvquant as fit_kvquant
from kvpolicy.calibration.levels import calibrate_kvquant as calibrate_kvquant
from kvpolicy.calibration.lowrank import calibrate_lowrank as calibrate_lowrank
from kvpolicy.calibration.qfilters import calibrate_qfilters as calibrate_qfilters
from kvpolicy.calibration.qfilters import query_filters as query_filters
from kvpolicy.calibration.triattention import calibrate_triattention as calibrate_triattention
from kvpolicy.calibration.triattention import query_centers as query_centers
from kvpolicy.hf.identity import identity as identity
from kvpolicy.hf.identity import model_info as model_info
