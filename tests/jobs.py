"""Which job of `.ci/run` runs a test, where its own markers do not say it.

`bash .ci/run` runs the tests of every commit. What compiles, draws, measures, builds or starts processes takes half of
the time of all tests: it has the marker `heavy`, and `bash .ci/run slow` runs it. A few tests of each kind stay.
"""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from importlib.util import find_spec
from typing import NamedTuple


class Kind(NamedTuple):
    """Tests that take long for the same reason, by patterns of `file` or `file::name`.

    Attributes:
        heavy: What `bash .ci/run slow` runs.
        kept: What stays among the tests of every commit.
    """

    heavy: tuple[str, ...]
    kept: tuple[str, ...]


KINDS = {
    "compiles code": Kind(
        (
            "tests/codecs/test_every_stage.py::test_it_compiles_whole",
            "tests/codecs/test_fused.py::test_*compiled*",
            "tests/codecs/test_fused.py::test_inductor_makes_the_same_codes",
            "tests/engine/test_compile.py",
            "tests/engine/test_compiled_reads.py",
            "tests/engine/test_generated_code.py",
            "tests/engine/test_shared_fork.py::test_a_step_compiles_once",
            "tests/eval/bench/test_kernel_start.py",
            "tests/kernels/test_compiled.py",
            "tests/kernels/test_gpu_reads.py",
            "tests/kernels/test_packing.py::test_compiled_code_unpacks_the_same",
            "tests/kernels/test_products.py::test_compiled_products",
            "tests/parallel/test_compiled.py",
        ),
        (
            "tests/engine/test_compile.py::test_a_flush_is_one_graph",
            "tests/kernels/test_compiled.py::test_any_number_of_slots_needs_one_graph",
            "tests/kernels/test_gpu_reads.py::test_extreme_numbers",
        ),
    ),
    "starts ranks": Kind(
        ("tests/deepspeed/*", "tests/lm_eval/test_tensor_parallel.py", "tests/parallel/*"),
        (
            "tests/deepspeed/test_loading.py",
            "tests/deepspeed/test_policies.py::test_generates_the_same",
            "tests/parallel/test_exact.py::test_mergers_on_two_ranks",
            "tests/parallel/test_ranks.py::test_ranks_answer_in_order",
        ),
    ),
    "starts a server": Kind(
        ("tests/cli/test_by_layer.py", "tests/serving/test_limits.py", "tests/serving/test_server.py"),
        (
            "tests/cli/test_by_layer.py::test_list_describes_it",
            "tests/cli/test_by_layer.py::test_refused",
            "tests/serving/test_limits.py::test_extreme_numbers_are_answered",
            "tests/serving/test_server.py::test_an_answer_is_that_of_generate",
            "tests/serving/test_server.py::test_bad_*",
            "tests/serving/test_server.py::test_a_stream_is_the_answer_in_pieces",
        ),
    ),
    "draws": Kind(
        (
            "tests/eval/notebooks/*",
            "tests/eval/pictures/*",
            "tests/eval/report/*",
            "tests/plots/*",
        ),
        (
            "tests/eval/notebooks/test_notebooks.py::test_cells_share_names_and_show_their_last_expression",
            "tests/eval/notebooks/test_notebooks.py::test_there_are_three",
            "tests/eval/pictures/test_pictures.py::TestPages::test_each_method_has_a_picture_that_its_page_shows",
            "tests/eval/pictures/test_pictures_codecs.py::test_every_codec_has_a_picture",
            "tests/eval/report/test_report.py::test_the_command",
            "tests/plots/test_figures.py::test_b*",
            "tests/plots/test_imports.py",
            "tests/plots/test_notebook.py",
        ),
    ),
    "measures": Kind(
        (
            "tests/benchmarks/test_codecs.py",
            "tests/benchmarks/test_speed.py",
            "tests/cli/test_bench.py",
            "tests/cli/test_calibrate.py",
            "tests/cli/test_compare.py",
            "tests/cli/test_tune.py",
            "tests/eval/bench/*",
            "tests/eval/board/*",
            "tests/eval/common/test_codecs.py",
            "tests/eval/gpu/*",
            "tests/eval/methods/*",
            "tests/eval/real/*",
            "tests/eval/sweep/test_sweep.py",
            "tests/eval/tables/*",
            "tests/eval/train/*",
            "tests/tuning/test_long_prompts.py",
            "tests/tuning/test_measure.py",
            "tests/tuning/test_tune.py",
        ),
        (
            "tests/cli/test_calibrate.py::test_error_messages",
            "tests/cli/test_calibrate.py::test_lowrank",
            "tests/cli/test_compare.py::test_errors",
            "tests/cli/test_compare.py::test_the_table",
            "tests/cli/test_tune.py::test_refused",
            "tests/eval/bench/test_bars.py::test_lines_say_pass_or_miss",
            "tests/eval/board/test_board.py::test_every_method_is_on_the_board",
            "tests/eval/board/test_board.py::test_a_cell_is_measured_once",
            "tests/eval/gpu/test_gpu.py::test_errors_are_one_sentence",
            "tests/eval/methods/test_methods.py::test_what_is_measured_of_a_method_is_of_this_method",
            "tests/eval/sweep/test_sweep.py::test_refusals",
            "tests/eval/tables/test_papers.py",
            "tests/eval/train/test_train.py::test_same_seed_gives_same_batches",
            "tests/tuning/test_measure.py::test_measures_are_those_of_the_reference",
            "tests/tuning/test_measure.py::test_what_cannot_be_measured_is_refused",
            "tests/tuning/test_tune.py::test_the_file_serves_any_budget",
        ),
    ),
    "runs pages and builds packages": Kind(
        (
            "tests/test_docs.py::test_commands_print_what_the_page_says",
            "tests/test_docs.py::test_every_policy_of_the_decision_table_runs",
            "tests/test_docs.py::test_python_runs",
            "tests/test_examples.py",
            "tests/test_extend.py",
            "tests/test_new_method.py::test_a_method_is_four_files_and_a_command",
        ),
        (
            "tests/test_docs.py::test_python_runs[[]docs/index*",
            "tests/test_docs.py::test_python_runs[[]docs/guide/p*",
            "tests/test_examples.py::test_the_page_shows_every_script",
        ),
    ),
}


def is_heavy(test: str) -> bool:
    """Whether a test, by its node ID, has the marker `heavy`."""
    return any(_matches(test, kind.heavy) and not _matches(test, kind.kept) for kind in KINDS.values())


def missing(modules: Iterable[str]) -> str:
    """The modules that are not installed, in words; empty if all are."""
    return ", ".join(name for name in modules if find_spec(name) is None)


def _matches(test: str, patterns: Iterable[str]) -> bool:
    file, _, name = test.partition("::")
    forms = {file, test, f"{file}::{name.partition('[')[0]}"}
    return any(fnmatchcase(form, pattern) for form in forms for pattern in patterns)
