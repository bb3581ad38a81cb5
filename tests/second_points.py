"""Tests that are for --thorough though their own files do not say so: the slowest second points.

What each of them shows has a cheaper main point in the fast lane. By beginnings of node ids.
"""

SECOND_POINTS = (
    "tests/adapter/test_check.py::test_a_mistake_is_found_in_its_stage[changes0-",
    "tests/adapter/test_check.py::test_a_mistake_is_found_in_its_stage[changes1-",
    "tests/adapter/test_check.py::test_packed_rows_of_a_tree[True]",
    "tests/adapter/test_check.py::test_what_is_a_part_of_the_next_stages_input_is_no_alibi[changes1-",
    "tests/adapter/test_check.py::test_what_is_a_part_of_the_next_stages_input_is_no_alibi[changes2-",
    "tests/adapter/test_layer_losses.py::test_steps_are_those_of_plain_optax[3-1-0-2]",
    "tests/adapter/test_measured_work.py::test_hidden_states_wider_than_the_compute_dtype_are_",
    "tests/models/test_hf_load.py::test_peak_extra_memory_is_one_tensor_per_thread[1]",
    "tests/models/test_sliced_loss.py::test_both_passes_equal_the_plain_formula[1-1.0]",
    "tests/models/test_sliced_loss.py::test_both_passes_equal_the_plain_formula[37-1.0]",
    "tests/models/test_token_blocks.py::test_a_decoders_layer[False-",
    "tests/models/test_token_blocks.py::test_a_decoders_layer[True-False]",
    "tests/planner/test_command.py::test_fewer_rows_that_fit_the_devices_are_named",
    "tests/planner/test_command.py::test_json_also_of_what_does_not_fit",
    "tests/planner/test_command.py::test_where_no_optimizer_helps_its_need_is_said",
    "tests/planner/test_search.py::test_more_device_memory_never_gives_a_slower_plan[True]",
    "tests/planner/test_search.py::test_more_host_memory_never_gives_a_much_slower_plan",
    "tests/planner/test_search.py::test_what_the_host_has_no_room_for_stays_on_the_devices",
    "tests/step/test_kept_chunks.py::test_keeping_results_trains_the_same[tied_num_devices",
    "tests/test_needs_table.py::test_the_table_and_the_plan_command_agree",
    "tests/training/test_expert_training.py::test_streamed_steps_equal_plain_optax[3-2-0-3-",
    "tests/training/test_expert_training.py::test_where_the_state_lies_changes_no_bit",
    "tests/training/test_gemma_training.py::test_gradients_of_windows_scales_and_ties_are_those_in",
    "tests/training/test_gradients_in_flight.py::test_one_device_keeps_the_bound",
    "tests/training/test_gradients_in_flight.py::test_without_the_bound_all_gradients_of_a_step_pile",
    "tests/training/test_host_boundaries.py::test_all_that_long_rows_need_at_once_equals_plain_optax",
    "tests/training/test_host_boundaries.py::test_shorter_rows_use_the_same_places_and_longer_ones",
    "tests/training/test_host_boundaries.py::test_where_boundaries_wait_changes_no_bit[2-{'frozen'",
    "tests/training/test_host_boundaries.py::test_where_boundaries_wait_changes_no_bit[4-",
    "tests/training/test_saves_beside.py::test_a_broken_fence_is_noticed[",
    "tests/training/test_saves_beside.py::test_a_dropped_trainer_is_freed_by_any_of_its_threads[host_",
    "tests/training/test_saves_beside.py::test_random_delays_change_no_byte_of_a_checkpoint_nor_of_"
    "the_run[resident-1]",
    "tests/training/test_saves_beside.py::test_what_changes_the_state_waits_for_copies",
    "tests/training/test_sliced_head.py::test_bfloat16_learns_as_in_one_pass",
    "tests/training/test_sliced_head.py::test_evaluation_is_the_first_pass_and_gives_the_steps_loss["
    "untied]",
    "tests/training/test_sliced_head.py::test_frozen_parts_are_as_in_one_pass[False-",
    "tests/training/test_sliced_head.py::test_parameters_that_need_another_update_are_sent_with",
    "tests/training/test_sliced_head.py::test_slices_equal_plain_optax[clip=",
    "tests/training/test_sliced_head.py::test_slices_equal_plain_optax[kept_chunks=",
    "tests/training/test_sliced_head.py::test_slices_equal_plain_optax[vocab_slices=8",
    "tests/transfer/test_gradient_sums.py::test_devices_sum_a_gradient_in_the_program_of_the_chunk_"
    "below[2-host_sum-False-0]",
    "tests/update/test_optimizers.py::test_whole_parameter_state_is_saved_and_restored_into_other_"
    "chunks[adafactor]",
    "tests/update/test_state_of_any_form.py::test_steps_are_those_of_plain_optax[shampoo]",
)
