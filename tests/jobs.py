"""Which job of `.ci/run` runs a test, where its own markers do not say it.

`bash .ci/run` runs the tests of every commit. What compiles, draws, measures, builds or starts processes takes half of
the time of all tests, and what goes a long way with each method takes half of the rest: these have the marker `heavy`,
and `bash .ci/run slow` runs them. A few tests of each kind stay.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from fnmatch import translate
from functools import cache
from importlib.util import find_spec
from typing import NamedTuple, TypeVar


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
            "tests/engine/test_layer_kinds.py::test_a_compiled_step_is_one_graph",
            "tests/codecs/test_csr.py::test_it_compiles_whole_and_once",
            "tests/codecs/test_every_stage.py::test_it_compiles_whole",
            "tests/codecs/test_fused.py::test_*compiled*",
            "tests/codecs/test_fused.py::test_inductor_makes_the_same_codes",
            "tests/codecs/test_minicache.py::test_a_write_compiles_whole",
            "tests/engine/test_reading.py::test_compiled_choices_are_the_same",
            "tests/engine/test_compile.py",
            "tests/engine/test_compiled_generation.py",
            "tests/engine/test_compile.py::test_every_policy_compiles_after_others",
            "tests/engine/test_generated_code.py",
            "tests/engine/test_page_geometry.py::test_one_graph_for_heads_of_any_size",
            "tests/engine/test_rollback.py::test_marked_steps_compile_to_one_graph",
            "tests/engine/test_rows.py::test_a_compiled_step_is_one_graph_whatever_rows_hold",
            "tests/engine/test_shared_fork.py::test_a_step_compiles_once",
            "tests/engine/test_launches.py::test_columns_are_right_after_compiled_steps_and_what_takes_back_or_copies",
            "tests/eval/bench/test_bars.py::test_a_first_read_compiles_and_a_second_one_does_not",
            "tests/kernels/test_compiled.py",
            "tests/kernels/test_gpu_reads.py",
            "tests/kernels/test_packing.py::test_compiled_code_unpacks_the_same",
            "tests/kernels/test_products.py::test_compiled_products",
            "tests/parallel/test_compiled.py",
            "tests/robust/test_tiles.py::test_steps_compile_once_behind_tiles",
            "tests/serving/test_warm_up.py::test_a_request_to_one_row_compiles_nothing",
            "tests/serving/test_warm_up.py::test_requests_share_one_graph",
            "tests/tuning/test_evidence.py::test_compiled_steps_give_the_same",
        ),
        (
            "tests/engine/test_compiled_generation.py::test_a_cache_says_whether_its_step_is_one_graph",
            "tests/engine/test_compiled_generation.py::test_off*",
            "tests/engine/test_compiled_generation.py::test_plain_steps",
            "tests/engine/test_compiled_generation.py::test_refused*",
            "tests/engine/test_compiled_generation.py::test_requests_are_compiled_once[[]any length]",
            "tests/engine/test_compiled_generation.py::test_what_cannot_be_compiled_is_said_once",
            "tests/kernels/test_compiled.py::test_any_number_of_slots_needs_one_graph",
            "tests/kernels/test_gpu_reads.py::test_extreme_numbers",
        ),
    ),
    "starts ranks": Kind(
        ("tests/deepspeed/*", "tests/lm_eval/test_tensor_parallel.py", "tests/parallel/*"),
        (
            "tests/deepspeed/test_launch.py::test_a_block*",
            "tests/deepspeed/test_loading.py::test_a*",
            "tests/deepspeed/test_loading.py::test_families_that_are_not_tested_are_rejected",
            "tests/deepspeed/test_loading.py::test_on*",
            "tests/deepspeed/test_policies.py::test_generates_the_same",
        ),
    ),
    "starts processes": Kind(
        (
            "tests/families/test_command.py::test_a_crash_and_an_endless_loop_end_one_entry_alone",
            "tests/engine/test_host_memory.py::test_another_device_than_the_host",
            "tests/test_lean_import.py::test_a_plan_imports_what_its_advice_needs",
            "tests/test_lean_import.py::test_a_command_imports_the_methods_of_its_policy",
            "tests/test_new_method.py::test_the_lists_that_the_command_writes_are_in_ruffs_order",
        ),
        ("tests/test_lean_import.py::test_a_command_imports_the_methods_of_its_policy[[]explain snapkv*",),
    ),
    "starts a server": Kind(
        (
            "tests/cli/test_by_layer.py",
            "tests/serving/test_fields.py",
            "tests/serving/test_formatted_answers.py",
            "tests/serving/test_limits.py",
            "tests/serving/test_rows.py",
            "tests/serving/test_server.py",
            "tests/serving/test_several_ranks.py",
        ),
        (
            "tests/cli/test_by_layer.py::test_list_describes_it",
            "tests/cli/test_by_layer.py::test_refused",
            "tests/serving/test_fields.py::test_choices_are_the_answers_of_seeds_that_follow_each_other",
            "tests/serving/test_limits.py::test_extreme_numbers_are_answered",
            "tests/serving/test_rows.py::test_answers_are_those_that_requests_have_alone[[]snapkv@*",
            "tests/serving/test_rows.py::test_rows_that_fit_into_a_memory",
            "tests/serving/test_server.py::test_an_answer_is_that_of_generate",
            "tests/serving/test_several_ranks.py::test_the_others*",
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
            "tests/benchmarks/test_speed.py",
            "tests/cli/test_bench.py",
            "tests/cli/test_calibrate.py",
            "tests/cli/test_compare.py",
            "tests/calibration/test_gate.py::test_a_hidden_layer_learns_what_a_line_cannot",
            "tests/cli/test_generate.py::test_compare_shows_where_texts_differ",
            "tests/cli/test_tune.py",
            "tests/engine/test_speculation.py::test_samples_have_the_distribution_of_the_full_cache",
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
            "tests/golden/test_golden.py::test_another_ranking_is_noticed_and_nothing_else",
            "tests/planning/test_activations.py::test_a_plan_is_*",
            "tests/planning/test_activations.py::test_long_prompts_are_encoded_in_ranges",
            "tests/tuning/test_evidence.py::test_bytes_are_a_share_of_the_full_cache",
            "tests/tuning/test_measure.py",
            "tests/tuning/test_comparison.py::test_all_rivals_are_different_and_run_at_the_same_bytes",
            "tests/tuning/test_tune.py",
        ),
        (
            "tests/cli/test_calibrate.py::test_error_messages",
            "tests/cli/test_calibrate.py::test_lowrank",
            "tests/cli/test_compare.py::test_errors",
            "tests/cli/test_compare.py::test_the_table",
            "tests/cli/test_tune.py::test_refused",
            "tests/eval/bench/test_bars.py::test_lines_say_pass_or_miss",
            "tests/eval/bench/test_tables.py::test_every_server_gets_both_workloads",
            "tests/eval/board/test_board.py::test_every_method_is_on_the_board",
            "tests/eval/board/test_board.py::test_a_cell_is_measured_once",
            "tests/eval/gpu/test_gpu.py::test_errors_are_one_sentence",
            "tests/eval/methods/test_methods.py::test_what_is_measured_of_a_method_is_of_this_method",
            "tests/eval/sweep/test_sweep.py::test_refusals",
            "tests/eval/tables/test_tables.py::test_the_page_has_what_the_command_prints",
            "tests/eval/tables/test_tables.py::test_a_r*",
            "tests/eval/tables/test_tables.py::test_rows_of_the_embedded_model_are_those_of_its_page",
            "tests/eval/train/test_train.py::test_same_seed_gives_same_batches",
            "tests/eval/common/test_table_command.py::test_planned_tables_of_the_pages_are_those_of_today[[]bits*",
            "tests/planning/test_activations.py::test_a_plan_is_what_tiles_need[[]*h2o+kivi*",
            "tests/planning/test_activations.py::test_a_plan_is_what_a_prefill_needs[[]h2o+kivi*",
            "tests/tuning/test_measure.py::test_measures_are_those_of_the_reference[[]specs0-llama*",
            "tests/tuning/test_measure.py::test_what_cannot_be_measured_is_refused",
            "tests/tuning/test_tune.py::test_the_file_serves_any_budget",
        ),
    ),
    "generates many texts": Kind(
        (
            "tests/cli/test_cache.py::test_a_file_with_loss_is_made_and_described",
            "tests/cli/test_cache.py::test_a_text_is_read_in_chunks",
            "tests/lm_eval/test_prefixes.py::test_a_task_with_several_groups_has_one_bar",
            "tests/lm_eval/test_request_cache.py::test_a_run_that_goes_on_shares_what_it_would_have_shared",
            "tests/lm_eval/test_rows.py::test_a_length_in_the_generation_config_counts_as_in_hf",
            "tests/lm_eval/test_rows.py::test_a_row_goes_to_the_next_prompt_when_its_answer_ends",
            "tests/lm_eval/test_rows.py::test_answers_are_those_of_one_row",
            "tests/selectors/test_drawn.py::test_prompt_and_generated_tokens_have_the_same_chance",
        ),
        (
            "tests/lm_eval/test_request_cache.py::test_a_run_that_goes_on_shares_what_it_would_have_shared[[]loglikelihood*",
            "tests/lm_eval/test_rows.py::test_a_length_in_the_generation_config_counts_as_in_hf[[]full]",
            "tests/lm_eval/test_rows.py::test_answers_are_those_of_one_row[[]snapkv@*",
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
    "tests/allocators/test_skipped.py::test_layers_that_are_skipped_keep_every_token_as_it_is",
    "tests/allocators/test_attention.py::test_in_a_model",
    "tests/allocators/test_attention.py::test_tiles_and_held_chunks_have_the_budgets_of_one_piece",
    "tests/allocators/test_bounds.py::test_division_to_come_is_within_every_bound",
    "tests/cli/test_app.py::test_commands_print_json",
    "tests/cli/test_app.py::test_completion",
    "tests/cli/test_app.py::test_error_messages",
    "tests/cli/test_app.py::test_the_help_is_as_wide_as_the_terminal_and_cuts_no_summary",
    "tests/cli/test_calibrate.py::test_error_messages",
    "tests/cli/test_explain.py::test_effects",
    "tests/cli/test_explain.py::test_error_messages",
    "tests/cli/test_explain.py::test_every_part_is_explained_with_the_bytes_of_the_plan",
    "tests/cli/test_generate.py::test_error_messages",
    "tests/cli/test_generate.py::test_the_text_is_that_of_model_generate",
    "tests/cli/test_inspect.py::test_marks_below_the_text",
    "tests/cli/test_outputs.py::test_a_program_loses_nothing_either",
    "tests/cli/test_outputs.py::test_no_input_is_replaced_with_or_without_force",
    "tests/cli/test_plan.py::test_error_messages",
    "tests/cli/test_plan.py::test_json_is_the_plan",
    "tests/cli/test_plan.py::test_other_ways_to_write_the_same",
    "tests/cli/test_plan.py::test_tune_is_recommended_where_it_fits",
    "tests/cli/test_tile.py::test_other_commands",
    "tests/cli/test_tune.py::test_refused",
    "tests/codecs/test_auto_buffer.py",
    "tests/codecs/test_chunks.py::test_attention_slot_by_slot_is_that_of_what_is_read",
    "tests/codecs/test_csr.py::test_a_head_alone_has_the_codes_that_it_has_beside_others",
    "tests/codecs/test_every_stage.py::test_rows_and_ways_to_read",
    "tests/codecs/test_every_stage.py::test_slots_are_taken_again",
    "tests/codecs/test_fused.py::test_fused_reads_are_those_of_decoding",
    "tests/codecs/test_lowrank.py::test_the_rules_of_codecs_hold",
    "tests/codecs/test_minicache.py::test_hard_pairs_of_directions",
    "tests/conformance/test_codes.py",
    "tests/conformance/test_fuzz.py",
    "tests/conformance/test_gear.py::test_gear_keeps_a_group_that_lives",
    "tests/conformance/test_gear.py::test_gear_of_all_data",
    "tests/conformance/test_layer.py",
    "tests/conformance/test_mergers.py",
    "tests/conformance/test_models.py::test_methods_and_families",
    "tests/conformance/test_moves.py",
    "tests/conformance/test_options.py",
    "tests/conformance/test_tiles.py",
    "tests/engine/test_attach.py::test_no_trace",
    "tests/engine/test_block_masks.py::test_it_equals_the_masked_stock_model",
    "tests/engine/test_budgets.py::test_bytes",
    "tests/engine/test_by_layer.py::test_a_row_of_a_batch_is_that_row_alone",
    "tests/engine/test_by_layer.py::test_every_layer_is_that_of_its_own_policy",
    "tests/engine/test_by_layer.py::test_random_divisions",
    "tests/engine/test_by_layer.py::test_saved_and_loaded",
    "tests/engine/test_by_layer.py::test_bytes_beyond_a_prompt_are_for_what_follows",
    "tests/engine/test_by_layer.py::test_chunks_turns_forks_drafts_and_beams",
    "tests/engine/test_by_layer_random.py",
    "tests/engine/test_bytes.py::test_plan_is_what_is_stored",
    "tests/engine/test_bytes.py::test_growing",
    "tests/engine/test_bytes.py::test_families",
    "tests/engine/test_bytes.py::test_squeeze",
    "tests/engine/test_bytes.py::test_without_a_hint",
    "tests/engine/test_bytes.py::test_bytes_are_a_bound",
    "tests/engine/test_bytes.py::test_dtypes",
    "tests/engine/test_bytes.py::test_what_a_cache_was_told_of_its_rows_is_counted",
    "tests/engine/test_bytes.py::test_a_chunk_that_waits_is_counted",
    "tests/engine/test_attach.py::test_no_warning_reaches_who_does_not_pass_the_old_name",
    "tests/engine/test_paged_rows.py::test_prompts_and_steps_are_those_of_a_list",
    "tests/engine/test_generate.py::test_interleaved",
    "tests/engine/test_generate.py::test_a_growing_cache_stays_within_its_budget_in_later_turns",
    "tests/engine/test_generate.py::test_no_token_is_lost_where_a_turn_has_a_smaller_budget",
    "tests/engine/test_generate.py::test_a_growing_cache_grows_behind_its_announcement",
    "tests/engine/test_generate.py::test_a_reset_cache_is_a_new_one",
    "tests/engine/test_rules.py::test_nothing_is_allocated_again",
    "tests/engine/test_rules.py::test_room_for_what_was_announced",
    "tests/engine/test_devices.py::test_like_one_device",
    "tests/engine/test_due_rows.py::test_only_due_rows_are_*",
    "tests/engine/test_due_rows.py::test_what_is_held_is_what_work_on_all_rows_would_leave",
    "tests/engine/test_editing.py::test_a_part_of_a_turn_is_cropped",
    "tests/engine/test_editing.py::test_a_removed_span_was_never_there",
    "tests/engine/test_editing.py::test_cropped_tokens_leave_no_trace",
    "tests/engine/test_block_masks.py::test_a_text_is_as_with_one_part",
    "tests/engine/test_features.py::test_beams_and_chunks",
    "tests/engine/test_features.py::test_offloaded_weights",
    "tests/engine/test_rules.py::test_equals_the_stock_cache",
    "tests/engine/test_rules.py::test_half_precision",
    "tests/engine/test_generate.py::test_drafts_with_every_token_kept",
    "tests/engine/test_generate.py::test_full_budget_gives_the_stock_tokens",
    "tests/engine/test_generate.py::test_small_budgets",
    "tests/engine/test_head_walks.py",
    "tests/engine/test_held_chunks.py::test_what_one_piece_keeps",
    "tests/engine/test_held_chunks.py::test_rows_are_chosen_between_held_chunks",
    "tests/engine/test_held_chunks.py::test_a_later_prompt_is_held_even_if_it_begins_with_one_token",
    "tests/engine/test_held_chunks.py::test_an_announcement_while_a_prompt_waits_makes_no_slots",
    "tests/engine/test_announcements.py::test_everything_is_kept_until_the_next_prompt",
    "tests/engine/test_host_memory.py::test_both_places_hold_what_was_planned",
    "tests/engine/test_host_memory.py::test_layers_that_follow_are_in_host_memory",
    "tests/engine/test_host_memory.py::test_outputs_and_bytes_are_those_of_the_device",
    "tests/engine/test_host_memory.py::test_shifts",
    "tests/engine/test_layer_kinds.py::test_evicting_equals_the_masked_stock_model",
    "tests/engine/test_layer_kinds.py::test_steps_are_undone_bit_for_bit",
    "tests/engine/test_layer_index.py",
    "tests/engine/test_budgets.py::test_a_row_has_the_larger_of_both",
    "tests/engine/test_layer_group.py::test_a_cache_holds_what_was_planned",
    "tests/engine/test_rules.py::test_peak",
    "tests/engine/test_rules.py::test_whole_peak",
    "tests/engine/test_rules.py::test_no_dense_copy",
    "tests/engine/test_rules.py::test_no_square",
    "tests/engine/test_page_geometry.py::test_a_growing_cache",
    "tests/engine/test_page_geometry.py::test_prompts_and_steps_are_those_of_a_list",
    "tests/engine/test_paged_rows.py::test_prompts_and_steps",
    "tests/engine/test_paged_rows.py::test_retrieval_heads_keep_all_and_streaming_heads_one_slot_for_the_rest",
    "tests/engine/test_paged_rows.py::test_mergers_in_prompts_of_a_cache_that_grows",
    "tests/engine/test_paged_rows.py::test_a_row_without_a_token_keeps_its_budget_and_its_pages",
    "tests/engine/test_paged_rows.py::test_rows_of_which_one_was_announced_too_few_tokens",
    "tests/engine/test_paged_rows.py::test_rows_that_evict",
    "tests/engine/test_held_chunks.py::test_what_is_kept_of_decoded_codes",
    "tests/engine/test_prompt_tiles.py::test_what_is_seen_and_what_comes_out",
    "tests/engine/test_recent_cache.py::test_what_runs_within_a_generation_is_not_the_answer",
    "tests/engine/test_refused.py::test_models",
    "tests/engine/test_replay.py::test_announced_chunks_are_one_prompt",
    "tests/engine/test_replay.py::test_rows_are_as_alone",
    "tests/engine/test_recent_cache.py::test_stock_tokens_under_full",
    "tests/engine/test_rollback.py",
    "tests/engine/test_announcements.py::test_ragged_rows_in_uneven_layers_stay_within_the_plan",
    "tests/engine/test_announcements.py::test_rows_go_on_as_alone",
    "tests/engine/test_announcements.py::test_windows_that_fill_later_count_in_a_budget_of_bytes",
    "tests/engine/test_rows.py",
    "tests/engine/test_shared_fork.py::test_codes_are_read_as_codes",
    "tests/engine/test_shared_fork.py::test_rows_answer_as_copies_do",
    "tests/engine/test_shared_keys.py::test_full_is_stock_however_many_logits_are_asked_for",
    "tests/engine/test_shared_keys.py::test_layers_that_read_count_where_tokens_are_ranked",
    "tests/engine/test_shared_keys.py::test_layers_that_read_see_what_their_owner_holds",
    "tests/engine/test_shared_keys.py::test_tiles_keep_what_one_piece_keeps",
    "tests/engine/test_shared_prefix.py::test_a_random_walk",
    "tests/engine/test_shared_prefix.py::test_rows_attend_to_the_prefix_and_to_their_own_tokens",
    "tests/engine/test_budgets.py::test_all_tokens_are_kept_as_planned",
    "tests/engine/test_speculation.py::test_a_perfect_and_a_bad_drafter",
    "tests/engine/test_speculation.py::test_every_selector_drafts",
    "tests/engine/test_squeeze.py::test_a_profile_gives_the_same_as_measuring",
    "tests/engine/test_squeeze.py::test_cosine_of_the_residual_stream",
    "tests/engine/test_squeeze.py::test_the_projection_may_stand_around_the_attention",
    "tests/engine/test_launches.py::test_blocks_are_counted_when_they_are_encoded",
    "tests/engine/test_text_angles.py::test_pieces_have_the_angles_of_one_forward",
    "tests/engine/test_trimming.py::test_a_cache_is_the_same",
    "tests/engine/test_trimming.py::test_the_same_is_kept",
    "tests/eval/catalog/test_catalog.py::test_a_wrong_entry_is_one_sentence",
    "tests/eval/data/test_embedded.py::test_full_cache_answers",
    "tests/eval/data/test_prompts.py::test_prompts_have_their_length",
    "tests/eval/peers/test_generate.py::test_our_bytes_are_the_most_that_the_cache_reports",
    "tests/eval/sweep/test_plan.py::test_every_policy_of_a_shipped_sweep_can_be_planned",
    "tests/eval/tables/test_tables.py::test_the_page_has_what_the_command_prints",
    "tests/families/test_families.py::test_a_sample",
    "tests/families/test_oracle.py::test_hidden_tokens_do_not_matter",
    "tests/families/test_refusals.py::test_a_refusal_names_its_reason",
    "tests/files/test_hostile_files.py::test_every_field_with_nasty_values",
    "tests/files/test_pictures.py::test_a_loaded_cache_goes_on_bit_for_bit",
    "tests/files/test_saved_cache.py::test_after_beams_and_in_inference_mode",
    "tests/files/test_saved_cache.py::test_families_and_dtypes",
    "tests/files/test_saved_cache.py::test_it_goes_on_bit_for_bit",
    "tests/files/test_saved_cache.py::test_work_inside_a_period",
    "tests/files/test_saved_cache.py::test_an_announced_prompt_of_which_a_part_was_seen",
    "tests/kernels/test_mixed_values.py::test_it_is_as_with_values_of_the_size_of_keys",
    "tests/kernels/test_mixed_values.py::test_planned_bytes_are_held",
    "tests/kernels/test_rotary.py::test_keys_are_rotated_and_undone_as_the_model_rotates",
    "tests/lm_eval/test_angles.py::test_answers_and_rolling_texts_have_the_scores_of_one_forward",
    "tests/lm_eval/test_model.py::test_a_harsh_policy_changes_answers",
    "tests/lm_eval/test_model.py::test_batch_size_changes_nothing",
    "tests/lm_eval/test_prefixes.py::test_an_exact_policy_answers_as_without_groups",
    "tests/mergers/test_laws.py::test_no_victim_is_the_base_bit_for_bit",
    "tests/planning/test_activations.py::test_activations_of_shipped_sizes",
    "tests/planning/test_activations.py::test_latent_attention",
    "tests/planning/test_activations.py::test_sliding_windows",
    "tests/planning/test_tuned.py::test_bytes_of_a_cache_are_within_the_budget",
    "tests/readers/test_readers.py::test_a_padded_row_reads_what_it_reads_alone",
    "tests/readers/test_readers.py::test_an_index_that_holds_all_reads_as_exact",
    "tests/readers/test_readers.py::test_chooses_what_the_slow_version_chooses",
    "tests/readers/test_readers.py::test_readers_of_a_basis_or_of_others_conform",
    "tests/readers/test_shadowkv.py::test_keys_are_projected_without_their_rotation",
    "tests/readers/test_reuse.py::test_a_short_row_reads_what_it_reads_alone",
    "tests/readers/test_reuse.py::test_reads_what_the_slow_version_reads",
    "tests/reference/test_codec_vectors.py::test_a_change_that_is_smaller_than_the_margin_changes_no_code",
    "tests/reference/test_codec_vectors.py::test_the_levels_of_max",
    "tests/reference/test_engine.py::test_kvcrush_without_representatives_is_its_base",
    "tests/reference/test_sum_vectors.py::test_outliers_are_a_share_of_their_vector",
    "tests/reference/test_vectors.py::test_kmeans_against_sklearn",
    "tests/robust/test_attachments.py::test_a_cache_is_used_again",
    "tests/robust/test_attachments.py::test_kinds_of_generation",
    "tests/robust/test_attachments.py::test_nested",
    "tests/robust/test_moves.py::test_the_defaults_of_pytorch_change_no_logits",
    "tests/robust/test_interrupts.py::test_a_later_forward_does_not_finish_what_was_broken_off",
    "tests/robust/test_interrupts.py::test_inside_a_layer",
    "tests/robust/test_interrupts.py::test_threads_on_one_model_and_on_two",
    "tests/robust/test_masks.py::test_generate_counts_tokens_in_any_mask",
    "tests/robust/test_masks.py::test_odd_masks",
    "tests/robust/test_moves.py::test_a_policy_computes_outside_autocast",
    "tests/robust/test_moves.py::test_changed_between_prompts",
    "tests/robust/test_numbers.py",
    "tests/robust/test_positions.py::test_keys_of_every_family_are_measured",
    "tests/robust/test_prompts.py",
    "tests/robust/test_uneven_heads.py",
    "tests/robust/test_masks.py::test_scoring",
    "tests/robust/test_wrappers.py::test_rows_with_adapters_of_their_own_keep_what_they_keep_alone",
    "tests/selectors/test_defaults.py::test_a_method_of_one_line_keeps_the_rules",
    "tests/selectors/test_every_selector.py::test_as_the_slow_version",
    "tests/selectors/test_every_selector.py::test_keeps_the_rules",
    "tests/selectors/test_every_selector.py::test_steps_of_some_rows",
    "tests/selectors/test_unrotated.py::test_steps_of_some_rows",
    "tests/serving/test_server.py::test_bad_requests_get_a_sentence",
    "tests/serving/test_templates.py::test_a_part_that_the_template_leaves_out",
    "tests/serving/test_texts.py::test_a_stop_string_is_found_with_its_space",
    "tests/test_adapters.py::test_a_padded_row_is_itself_alone",
    "tests/test_docs.py::test_commands_are_taken_by_their_programs",
    "tests/test_shipped.py::test_a_plan_without_transformers_is_the_same",
    "tests/test_spans.py::test_shares_are_those_of_the_slots_in_padded_rows",
    "tests/test_testing.py::test_every_part_passes",
    "tests/test_testing.py::test_wrong_ones_are_told",
    "tests/test_weights.py::test_large_models",
    "tests/tuning/test_evidence.py::test_score_is_that_of_a_dense_forward_with_a_mask",
    "tests/vllm/test_compressor.py::test_parts_are_one_piece",
    "tests/vllm/test_dense_layers.py",
    "tests/vllm/test_recipe.py::test_a_recipe_keeps_what_attach_keeps",
)
"""Tests that go a long way with each of many methods or sizes, by patterns of `file` or `file::name`.

Shorter tests meet each method on every commit: its own, those of slow versions, and tests/conformance/test_models.py.
"""

STAYS = 8
"""Of so many cases of a walk, the first one is among the tests of every commit."""


BLOCK = 16
"""Neighboring tests that run in the same part of a job."""
T = TypeVar("T")


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


def part_of(tests: Sequence[T], part: str) -> list[T]:
    """One of several parts of the tests, such as `2/6`, in their order.

    Neighboring tests share fixtures and take similarly long, so blocks of them are dealt out.
    """
    number, parts = map(int, part.split("/"))
    if not 1 <= number <= parts:
        raise ValueError(f"the part must be one of {parts}, got {part}")
    return [test for place, test in enumerate(tests) if place // BLOCK % parts == number - 1]


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
