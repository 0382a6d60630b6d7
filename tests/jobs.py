"""Which job of `.ci/run` runs a test, where its own markers do not say it.

`bash .ci/run` runs the tests of every commit. What compiles, draws, measures, builds or starts processes takes half of
the time of all tests, and what goes a long way with each method takes half of the rest: these have the marker `heavy`,
and `bash .ci/run slow` runs them. A few tests of each kind stay.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from fnmatch import translate
from functools import cache
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
            "tests/codecs/test_csr_rules.py::test_it_compiles_whole_and_once",
            "tests/codecs/test_every_stage.py::test_it_compiles_whole",
            "tests/codecs/test_fused.py::test_*compiled*",
            "tests/codecs/test_fused.py::test_inductor_makes_the_same_codes",
            "tests/codecs/test_minicache.py::test_a_write_compiles_whole",
            "tests/engine/test_choosing.py::test_compiled_choices_are_the_same",
            "tests/engine/test_coded_pages.py::test_one_graph_for_heads_of_any_size",
            "tests/engine/test_compile.py",
            "tests/engine/test_compiled_pairs.py",
            "tests/engine/test_compiled_reads.py",
            "tests/engine/test_generated_code.py",
            "tests/engine/test_lowrank_layers.py::test_a_step_compiles_once_and_is_that_of_eager_code",
            "tests/engine/test_rollback.py::test_marked_steps_compile_to_one_graph",
            "tests/engine/test_shared_fork.py::test_a_step_compiles_once",
            "tests/engine/test_states.py::test_a_compiled_step_is_one_graph",
            "tests/eval/bench/test_kernel_start.py",
            "tests/kernels/test_compiled.py",
            "tests/kernels/test_gpu_reads.py",
            "tests/kernels/test_packing.py::test_compiled_code_unpacks_the_same",
            "tests/kernels/test_products.py::test_compiled_products",
            "tests/parallel/test_compiled.py",
            "tests/robust/test_tiles.py::test_steps_compile_once_behind_tiles",
            "tests/selectors/test_kvzap.py::test_a_compiled_step_scores_its_token",
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
            "tests/deepspeed/test_loading.py::test_a*",
            "tests/deepspeed/test_loading.py::test_families_that_are_not_tested_are_rejected",
            "tests/deepspeed/test_loading.py::test_on*",
            "tests/deepspeed/test_policies.py::test_generates_the_same",
        ),
    ),
    "starts processes": Kind(
        (
            "tests/engine/test_host_memory.py::test_another_device_than_the_host",
            "tests/test_lean_import.py::test_a_plan_imports_what_its_advice_needs",
            "tests/test_lean_import.py::test_a_command_imports_the_methods_of_its_policy",
        ),
        ("tests/test_lean_import.py::test_a_command_imports_the_methods_of_its_policy[[]explain snapkv*",),
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
            "tests/engine/test_replay.py::test_a_question_after_the_context",
            "tests/eval/common/test_codecs.py",
            "tests/eval/common/test_table_command.py::test_planned_tables_of_the_pages_are_those_of_today",
            "tests/eval/gpu/*",
            "tests/eval/methods/*",
            "tests/eval/real/*",
            "tests/eval/sweep/test_sweep.py",
            "tests/eval/peers/test_peers.py::test_fills_a_page_from_an_earlier_run",
            "tests/eval/peers/test_peers.py::test_our_side_falls_into_no_trap",
            "tests/eval/tables/*",
            "tests/eval/train/*",
            "tests/planning/test_activations.py::test_a_plan_is_*",
            "tests/planning/test_activations.py::test_long_prompts_are_encoded_in_ranges",
            "tests/tuning/test_evidence.py::test_bytes_are_a_share_of_the_full_cache",
            "tests/tuning/test_long_prompts.py",
            "tests/tuning/test_measure.py",
            "tests/tuning/test_rivals.py::test_all_rivals_are_different_and_run_at_the_same_bytes",
            "tests/tuning/test_rivals.py::test_the_best_has_the_most_right_answers_and_then_the_lowest_divergence",
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
            "tests/eval/common/test_table_command.py::test_planned_tables_of_the_pages_are_those_of_today[[]bits*",
            "tests/eval/peers/test_peers.py::test_our_side_falls_into_no_trap[[]model compiled*",
            "tests/planning/test_activations.py::test_a_plan_is_what_tiles_need[[]*h2o+kivi*",
            "tests/planning/test_activations.py::test_a_plan_is_what_a_prefill_needs[[]h2o+kivi*",
            "tests/tuning/test_measure.py::test_measures_are_those_of_the_reference[[]specs0-llama*",
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


WALKS = (
    "tests/allocators/test_attention.py::test_keeps_the_rules",
    "tests/allocators/test_bounds.py::test_division_to_come_is_within_every_bound",
    "tests/cli/test_explain.py::test_every_part_is_explained_with_the_bytes_of_the_plan",
    "tests/cli/test_app.py::test_the_help_is_as_wide_as_the_terminal_and_cuts_no_summary",
    "tests/codecs/test_auto_buffer.py",
    "tests/codecs/test_csr_rules.py::test_a_head_alone_has_the_codes_that_it_has_beside_others",
    "tests/conformance/test_codes.py",
    "tests/conformance/test_fuzz.py",
    "tests/conformance/test_layer.py",
    "tests/conformance/test_mergers.py",
    "tests/conformance/test_moves.py",
    "tests/conformance/test_options.py",
    "tests/conformance/test_tiles.py",
    "tests/engine/test_budgets.py::test_bytes",
    "tests/engine/test_by_layer.py::test_bytes_fit_and_no_larger_factor_does",
    "tests/engine/test_by_layer.py::test_random_divisions",
    "tests/engine/test_by_layer_moves.py",
    "tests/engine/test_by_layer_random.py",
    "tests/engine/test_bytes.py",
    "tests/engine/test_conversations.py",
    "tests/engine/test_decode.py::test_nothing_is_allocated_again",
    "tests/engine/test_due_rows.py::test_a_row_holds_what_it_would_alone",
    "tests/engine/test_due_rows.py::test_only_due_rows_are_*",
    "tests/engine/test_due_rows.py::test_so_does_the_index_of_a_reader",
    "tests/engine/test_due_rows.py::test_what_is_held_is_what_work_on_all_rows_would_leave",
    "tests/engine/test_full_budget.py",
    "tests/engine/test_generate.py::test_small_budgets",
    "tests/engine/test_head_walks.py",
    "tests/engine/test_held_chunks.py",
    "tests/engine/test_hold_next.py",
    "tests/engine/test_host_memory.py::test_outputs_and_bytes_are_those_of_the_device",
    "tests/engine/test_index_reader.py",
    "tests/engine/test_least_tokens.py::test_a_row_has_the_larger_of_both",
    "tests/engine/test_memory.py::test_peak",
    "tests/engine/test_no_dense.py",
    "tests/engine/test_no_square.py",
    "tests/engine/test_page_geometry.py::test_prompts_and_steps_are_those_of_a_list",
    "tests/engine/test_paged_merges.py",
    "tests/engine/test_rollback.py",
    "tests/engine/test_room.py::test_rows_go_on_as_alone",
    "tests/engine/test_rows.py",
    "tests/engine/test_rules.py::test_a_query_attends_to_the_budget",
    "tests/files/test_saved_cache.py::test_it_goes_on_bit_for_bit",
    "tests/engine/test_trimming.py::test_the_same_is_kept",
    "tests/files/test_saved_schedules.py",
    "tests/lm_eval/test_model.py::test_batch_size_changes_nothing",
    "tests/readers/test_readers.py::test_a_padded_row_reads_what_it_reads_alone",
    "tests/readers/test_readers.py::test_chooses_what_the_slow_version_chooses",
    "tests/robust/test_attachments.py::test_kinds_of_generation",
    "tests/robust/test_defaults.py::test_the_defaults_of_pytorch_change_no_logits",
    "tests/robust/test_masks.py::test_odd_masks",
    "tests/robust/test_moves.py::test_a_policy_computes_outside_autocast",
    "tests/robust/test_numbers.py",
    "tests/robust/test_prompts.py",
    "tests/robust/test_uneven_heads.py",
    "tests/selectors/test_every_selector.py::test_keeps_the_rules",
    "tests/test_adapters.py::test_a_padded_row_is_itself_alone",
    "tests/test_shipped.py::test_a_plan_without_transformers_is_the_same",
    "tests/vllm/test_dense_layers.py",
)
"""Tests that go a long way with each of many methods or sizes, by patterns of `file` or `file::name`.

Shorter tests meet each method on every commit: its own, those of slow versions, and tests/conformance/test_models.py.
"""

STAYS = 4
"""Of so many cases of a walk, the first one is among the tests of every commit."""


def heavy_tests(tests: Iterable[str]) -> set[str]:
    """Which of the tests of every commit, by their node IDs and in the order of their cases, get the marker `heavy`."""
    found: set[str] = set()
    cases = Counter[str]()
    for test in tests:
        if is_heavy(test):
            found.add(test)
        elif _matches(test, WALKS):
            name = test.partition("[")[0]
            if cases[name] % STAYS:
                found.add(test)
            cases[name] += 1
    return found


def is_heavy(test: str) -> bool:
    """Whether a test, by its node ID, is one of a kind that is heavy in all of its cases."""
    return any(_matches(test, kind.heavy) and not _matches(test, kind.kept) for kind in KINDS.values())


def missing(modules: Iterable[str]) -> str:
    """The modules that are not installed, in words; empty if all are."""
    return ", ".join(name for name in modules if find_spec(name) is None)


def _matches(test: str, patterns: tuple[str, ...]) -> bool:
    file, _, name = test.partition("::")
    forms = {file, test, f"{file}::{name.partition('[')[0]}"}
    return any(map(_one_of(patterns).match, forms))


@cache
def _one_of(patterns: tuple[str, ...]) -> re.Pattern[str]:
    """An expression for what fits one of the patterns: there are thousands of tests, and a hundred patterns."""
    return re.compile("|".join(map(translate, patterns)))
