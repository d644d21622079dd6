"""Which tests wait for CI, and for which not even CI has time, because others show nearly the same in less.

`make test` has ten minutes on two cores, all of CI forty. Entries are beginnings of node ids; conftest.py marks them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

SLOW = (
    # Files of what watches, measures and shows a training, and of the tests' own tools.
    "tests/dist/test_probe.py",
    "tests/dist/test_ranks.py",
    "tests/dist/test_helpers.py",
    "tests/dist/test_state.py",
    "tests/dist/test_stragglers.py",
    "tests/dist/test_page_problems.py",
    "tests/dist/test_profile.py",
    "tests/dist/test_machine.py",
    "tests/dist/test_numbers.py",
    "tests/dist/test_bench.py",
    "tests/dist/test_lab.py",
    "tests/dist/test_best.py",
    "tests/cli/test_bench.py",
    "tests/cli/test_ckpt.py",
    "tests/cli/test_lab.py",
    "tests/browser/test_following.py",
    "tests/browser/test_panels.py",
    "tests/browser/test_live.py",
    "tests/benchmarks/test_baselines.py",
    # Single tests.
    "tests/slurm/test_submit.py::test_whatever_happens_the_job_completes_with_the_same_weights",
    "tests/slurm/test_srun.py::test_two_nodes_with_two_ranks_each",
    "tests/parity/test_reshard.py::test_a_run_goes_on_as_another_layout_left_it",
    "tests/parity/test_batch_norm.py::test_it_normalises_over_the_micro_batches_of_all_ranks",
    "tests/faults/test_nodes.py::test_unequal_nodes_find_each_other_and_give_the_numbers_of_one_process",
    "tests/faults/test_doctor.py::test_people_read_the_finding_and_its_fix",
    "tests/faults/test_doctor.py::test_eight_ranks_on_three_axes_get_the_right_values_from_every_collective",
    "tests/faults/test_verdicts.py::test_a_fault_ends_as_it_should[skipped-collective]",
    "tests/faults/test_fuzz.py::test_a_damaged_checkpoint_gives_the_right_weights_or_a_sentence",
    "tests/faults/test_recover.py::test_a_loss_of_five_times_the_level_is_found_at_its_step_by_every_rank",
    "tests/faults/test_invariants.py::test_a_sound_training_passes_every_check_on_every_layout",
    "tests/parity/test_zoo.py::test_what_the_zoo_says_of_a_model_is_true",
    "tests/parity/test_reshard.py::test_a_reader_written_from_the_documentation_alone_reads_the_same_bytes",
    "tests/cli/test_launchers.py::test_the_unchanged_script_gives_the_numbers_of_plain_python",
    "tests/cli/test_pipeline.py::test_a_recipe_trains_as_a_pipeline_and_says_how_it_is_cut",
    "tests/dist/test_save.py::test_a_disk_that_fills_up_stops_the_run_and_all_older_checkpoints_are_whole",
    "tests/dist/test_save.py::test_a_script_that_ends_while_a_checkpoint_is_written_waits_for_it",
    "tests/parity/test_sharding.py::test_gradients_travel_in_the_format_that_was_asked_for",
    "tests/parity/test_sharding.py::test_weights_stored_in_bf16_are_the_rounded_ones_of_fp32",
    "tests/parity/test_zoo.py::test_a_plain_model_trains_as_in_one_process_or_is_refused[hf-llama-pp=2]",
    "tests/parity/test_zoo.py::test_a_plain_model_trains_as_in_one_process_or_is_refused[nanogpt-no-bias-tp=2]",
    "tests/parity/test_precision.py::test_losses_agree_with_one_process_within_the_rounding_of_the_format[fsdp=2-fp32]",
    "tests/parity/test_layouts.py::test_every_rank_reports_the_same_steps_and_holds_the_same_weights[fsdp=3-1-clipped]",
    "tests/parity/test_tensor.py::test_a_run_that_stopped_has_the_bits_of_one_that_did_not[tp=2]",
    "tests/dist/test_resume.py::test_a_run_that_stopped_has_the_bits_of_one_that_did_not[dp=2-stream",
    "tests/dist/test_resume.py::test_a_run_that_stopped_has_the_bits_of_one_that_did_not[dp=2-workers",
    "tests/dist/test_sabotage.py::test_a_sound_layout_passes[dp=2,fsdp=2-zero1]",
    "tests/cli/test_fetch.py::test_a_run_without_its_data_starts_nothing_and_with_them_suggests_commands_that_work",
    "tests/cli/test_verify.py::test_a_script_that_fails_is_shown_with_its_output_and_its_traceback",
    "tests/dist/test_allowed.py::test_the_numbers_are_those_of_a_plain_loop[tp=2]",
    "tests/dist/test_allowed.py::test_the_numbers_are_those_of_a_plain_loop[cp=2]",
    "tests/dist/test_allowed.py::test_the_numbers_are_those_of_a_plain_loop[pp=2]",
    "tests/dist/test_alone.py::test_on_several_ranks_they_are_refused_by_name[pp=2]",
    "tests/dist/test_alone.py::test_on_several_ranks_they_are_refused_by_name[tp=2]",
    "tests/dist/test_sabotage.py::test_what_trains_is_proved_too[hf-gpt2 tp=2]",
    "tests/dist/test_steps.py::test_gradients_are_summed_once_a_step_however_many_micro_batches[dp=2,fsdp=2",
    "tests/dist/test_resume.py::test_a_run_that_stopped_has_the_bits_of_one_that_did_not[fsdp=2-evaluate]",
    "tests/faults/test_alike.py::test_two_nodes_that_do_not_run_the_same_thing_are_refused_by_host_and_name[another",
    "tests/faults/test_verdicts.py::test_a_fault_ends_as_it_should[exception]",
    "tests/faults/test_data_workers.py::test_an_exception_is_the_sample_and_the_innermost_line_of_the_users[Stream-0]",
    "tests/parity/test_precision.py::test_losses_agree_with_one_process_within_the_rounding_of_the_format[fsdp=2-fp16]",
    "tests/parity/test_zoo.py::test_a_plain_model_trains_as_in_one_process_or_is_refused[nanogpt-no-bias-pp=2]",
    "tests/parity/test_zoo.py::test_a_plain_model_trains_as_in_one_process_or_is_refused[rotary-gpt-tp=2]",
    "tests/browser/test_page.py::test_five_megabytes_open_at_once",
    "tests/browser/test_page.py::test_it_prints_light_whole_and_without_what_only_a_screen_needs",
    "tests/parity/test_precision.py::test_an_overflow_on_one_rank_is_skipped_by_all_in_the_same_step[dp=2,fsdp=2]",
    "tests/dist/test_sabotage.py::test_what_trains_is_proved_too[hf-t5 pp=2]",
    "tests/dist/test_sabotage.py::test_what_trains_is_proved_too[resnet pp=2]",
    "tests/dist/test_pipeline.py::test_a_run_comes_back_as_another_pipeline_or_none[pp=4",
    "tests/dist/test_pipeline.py::test_a_run_comes_back_as_another_pipeline_or_none[pp=2,fsdp=2",
    "tests/dist/test_pipeline.py::test_a_run_comes_back_as_another_pipeline_or_none[pp=2-{'schedule'",
    "tests/dist/test_pipeline.py::test_a_run_that_comes_back_is_cut_where_it_was",
    "tests/dist/test_pipeline.py::test_frozen_parameters_stay_where_they_were",
    "tests/dist/test_pipeline.py::test_a_metric_may_leave_the_model_alone[pp=2,dp=2",
    "tests/dist/test_pipeline.py::test_batch_norm_has_the_statistics_of_one_process[pp=2,dp=2]",
    "tests/parity/test_tensor.py::test_a_block_talks_as_often_as_it_has_to[tp=2-on",
    "tests/faults/test_recover.py::test_ranks_that_fail_together_save_together_and_one_alone_cannot",
    "tests/faults/test_recover.py::test_all_ranks_skip_or_take_back_the_same_steps_to_the_bit[fsdp=2",
    "tests/faults/test_data_workers.py::test_a_process_that_hangs_ends_the_run_and_itself",
    "tests/faults/test_data_workers.py::test_a_process_that_dies_is_named_with_its_sample[exit",
    "tests/cli/test_train.py::test_a_killed_launcher_leaves_no_worker_behind",
    "tests/cli/test_train.py::test_a_changed_config_does_not_continue_a_run",
    "tests/cli/test_tensor.py::test_how_the_matrices_are_cut_is_explained",
    "tests/dist/test_save.py::test_a_script_whose_last_save_fails_does_not_exit_as_if_all_were_well",
    "tests/dist/test_save.py::test_the_same_command_that_went_back_goes_on_when_it_is_typed_again",
    "tests/dist/test_resume.py::test_a_save_that_was_killed_leaves_the_checkpoint_before_it[fsdp=2]",
    "tests/dist/test_resume.py::test_the_best_and_the_last_two_checkpoints_stay[dp=2]",
    "tests/dist/test_resume.py::test_loading_unpickles_nothing[fsdp=2]",
    "tests/dist/test_user_models.py::test_it_trains_as_on_one_process[frozen batch norm-square-False-fsdp=3]",
    "tests/dist/test_user_models.py::test_it_trains_as_on_one_process[recomputed batch norm-square-True-fsdp=3]",
    "tests/dist/test_user_models.py::test_it_trains_as_on_one_process[plain-mixed up-False-fsdp=3]",
    "tests/dist/test_user_models.py::test_a_checkpoint_of_another_run_begins_a_run_and_its_own_ones_continue_it",
    "tests/dist/test_evaluate.py::test_metrics_over_any_number_of_samples_equal_those_of_one_process[dp=2,fsdp=2]",
    "tests/dist/test_evaluate.py::test_metrics_over_any_number_of_samples_equal_those_of_one_process[fsdp=3]",
    "tests/dist/test_init_weights.py::test_a_large_model_that_rank_0_sends_starts_with_the_weights_of_one_process[dp=2",
    "tests/dist/test_steps.py::test_batch_norm_has_the_statistics_and_gradients_of_one_process[fsdp=3-2]",
    "tests/dist/test_trainer.py::test_leaving_the_loop_leaves_an_unfinished_run_that_goes_on",
    "tests/parity/test_reshard.py::test_every_layout_writes_each_tensor_once_and_every_rank_a_share[pp=2,tp=2]",
    "tests/parity/test_reshard.py::test_every_layout_writes_each_tensor_once_and_every_rank_a_share[cp=2]",
    "tests/parity/test_sharding.py::test_a_checkpoint_holds_the_same_at_every_level",
    "tests/unit/test_planner_trace.py::test_formulas_hold_what_the_real_model_holds[gpt2-tp=2",
    "tests/faults/test_hosts.py::test_a_cut_host_is_silent_until_it_is_mended",
    "tests/faults/test_recover.py::test_a_training_that_learns_nothing_any_more_stops_and_says_so",
    "tests/dist/test_pipeline.py::test_batch_norm_has_the_statistics_of_one_process[pp=2]",
    "tests/dist/test_pipeline.py::test_stages_begin_where_the_cuts_are",
    "tests/dist/test_resume.py::test_a_run_that_went_back_saves_the_damaged_step_anew",
    "tests/dist/test_user_models.py::test_going_back_to_a_checkpoint_sets_the_later_ones_aside_and_saves_anew",
    "tests/parity/test_optimizers.py::test_parameters_and_losses_of_other_kinds_give_the_numbers_of_a_plain_loop[zero1]",
    "tests/faults/test_nursery.py::test_a_worker_has_torch_already_and_its_own_variables",
)

SOAK = (
    # Of every kind of disturbance one stays: a daemon killed, a job preempted, a signal to a step and to a rank; one
    # job is followed through a requeue, one cut off, one cancelled. The limit of a job is a minute at least, and a
    # machine with much to do needs that to start.
    "tests/slurm/test_submit.py::test_whatever_happens_the_job_completes_with_the_same_weights[unplugged]",
    "tests/slurm/test_submit.py::test_whatever_happens_the_job_completes_with_the_same_weights[node-down]",
    "tests/slurm/test_submit.py::test_whatever_happens_the_job_completes_with_the_same_weights[crash",
    "tests/slurm/test_submit.py::test_whatever_happens_the_job_completes_with_the_same_weights[time-limit]",
    "tests/slurm/test_submit.py::test_whatever_happens_the_job_completes_with_the_same_weights[requeue]",
    "tests/slurm/test_submit.py::test_a_job_that_may_lose_a_node_goes_on_without_the_queue",
    "tests/parity/test_compile.py::test_the_whole_table_gives_the_numbers_of_one_process",
    "tests/parity/test_compile.py::test_a_compiled_run_goes_on_with_the_same_dropout_masks",
    "tests/parity/test_compile.py::test_a_second_process_finds_the_compiled_code_on_disk",
    "tests/parity/test_compile.py::test_compiled_batch_norm_counts_every_micro_batch_once",
    "tests/parity/test_tensor.py::test_compiled_code_gives_the_numbers_of_one_eager_process[cp=2",
    "tests/faults/test_verdicts.py::test_a_fault_ends_as_it_should[usr1]",
    "tests/faults/test_verdicts.py::test_a_fault_ends_as_it_should[stop-file]",
    "tests/faults/test_verdicts.py::test_a_fault_ends_as_it_should[ctrl-c-twice]",
    "tests/faults/test_verdicts.py::test_a_fault_ends_as_it_should[stopped-rank-0]",
    "tests/faults/test_verdicts.py::test_a_fault_ends_as_it_should[asleep]",
    "tests/faults/test_verdicts.py::test_a_fault_ends_as_it_should[exit-0]",
    "tests/faults/test_verdicts.py::test_a_fault_ends_as_it_should[exit-2]",
    "tests/faults/test_verdicts.py::test_a_fault_ends_as_it_should[kill-rank-0]",
    "tests/faults/test_verdicts.py::test_a_fault_ends_as_it_should[kill-while-saving]",
    "tests/faults/test_verdicts.py::test_a_fault_ends_as_it_should[terminate]",
    "tests/faults/test_verdicts.py::test_a_fault_ends_as_it_should[exception-again]",
    "tests/faults/test_verdicts.py::test_a_fault_ends_as_it_should[abort]",
    "tests/faults/test_verdicts.py::test_without_restarts_the_verdict_is_final[memory]",
    "tests/faults/test_verdicts.py::test_without_restarts_the_verdict_is_final[kill]",
    "tests/faults/test_verdicts.py::test_without_restarts_the_verdict_is_final[segfault]",
    "tests/faults/test_verdicts.py::test_without_restarts_the_verdict_is_final[exit-3]",
    "tests/faults/test_nodes.py::test_a_node_that_joins_takes_part_and_no_step_is_lost",
    "tests/faults/test_soak.py::test_random_kills_of_ranks_and_launchers_change_no_bit[6]",
    "tests/faults/test_ends.py::test_a_run_under_nohup_survives_the_end_of_its_terminal",
    "tests/faults/test_ends.py::test_a_crash_after_a_stop_is_a_crash",
    "tests/faults/test_recover.py::test_ten_clean_trainings_give_no_alarm",
    "tests/parity/test_reshard.py::test_a_run_goes_on_as_any_layout_left_it[single]",
    "tests/parity/test_reshard.py::test_a_run_goes_on_as_any_layout_left_it[dp=2,fsdp=2]",
    "tests/parity/test_reshard.py::test_a_run_goes_on_as_any_layout_left_it[fsdp=2,tp=2]",
    "tests/parity/test_reshard.py::test_a_run_goes_on_as_any_layout_left_it[dp=4]",
    "tests/parity/test_reshard.py::test_a_run_goes_on_as_any_layout_left_it[tp=2]",
    "tests/parity/test_reshard.py::test_going_on_under_the_same_layout_changes_no_bit[fsdp=2,tp=2]",
    "tests/parity/test_reshard.py::test_a_run_goes_on_as_any_layout_left_it[fsdp=4]",
    "tests/parity/test_reshard.py::test_a_run_goes_on_as_any_layout_left_it[cp=2]",
    "tests/dist/test_ranks.py::test_hang_is_named_with_where_it_stands[stop_itself]",
    "tests/dist/test_network.py::test_two_hosts_train_together_without_a_word_about_interfaces[loopback-address]",
    "tests/dist/test_network.py::test_an_unknown_head_is_refused_on_every_rank",
    "tests/dist/test_network.py::test_torchrun_on_two_hosts[static]",
    "tests/dist/test_network.py::test_two_hosts_train_together_without_a_word_about_interfaces[none-address]",
    "tests/cli/test_launchers.py::test_the_example_runs_unchanged_and_learns_the_same",
    "tests/cli/test_train.py::test_the_default_recipe_learns_more_than_a_bigram_model",
    "tests/cli/test_train.py::test_another_layout_gives_the_same_numbers[options1]",
    "tests/cli/test_train.py::test_another_layout_gives_the_same_numbers[options2]",
    "tests/cli/test_tensor.py::test_a_plain_script_is_proved[tp=2]",
    "tests/benchmarks/test_peers.py::test_a_pipeline_trains_the_same_as_one_written_with_torch",
    "tests/benchmarks/test_peers.py::test_cut_matrices_train_the_same_as_those_cut_with_torch",
)
"""Run by `make test-all`."""

SLOW_CELLS = {
    # The cells of a table: all of their tests, which share one training.
    "tests/parity/test_pipeline.py": ("pp=2,fsdp=2-zero3-1f1b-6", "pp=2,dp=2-zbv-6"),
    "tests/parity/test_tensor.py": ("pp=2,tp=2-1f1b",),
    "tests/parity/test_layouts.py": (
        *("dp=2,fsdp=2-2-no blocks", "fsdp=3-1-no blocks", "dp=2,fsdp=2-2-clipped", "dp=2,fsdp=2-2-recompute"),
        "fsdp=3-1-clipped",
    ),
    "tests/parity/test_precision.py": ("fsdp=2-fp16, fp16 sums", "dp=2,fsdp=2-fp16, fp16 sums"),
    "tests/faults/test_recover.py": ("the loss", "between steps"),
}

SOAKED_CELLS = {
    "tests/parity/test_pipeline.py": (
        *("pp=4-zbv-4", "pp=4-interleaved-zero-bubble-4", "pp=4-gpipe-1", "pp=4-looped-bfs-1"),
        *("pp=2,fsdp=2-zero1-interleaved-zero-bubble-2", "pp=2-gpipe-1"),
        *("pp=2,fsdp=2-zero2-interleaved-zero-bubble-6", "pp=2,fsdp=2-zero1-1f1b-2"),
    ),
    "tests/parity/test_tensor.py": ("fsdp=2,cp=2-zero1", "cp=4", "fsdp=2,tp=2-zero1", "fsdp=2,tp=2-zero1-frozen"),
    "tests/parity/test_sharding.py": ("fsdp=3-zero1", "fsdp=3-zero1 fused"),
    "tests/parity/test_layouts.py": ("fsdp=3-1-plain", "fsdp=4-2-plain", "fsdp=3-1-dropout"),
    "tests/dist/test_pipeline.py": ("dropout in and outside of blocks-pp=2,fsdp=2-1f1b-zero3",),
    "tests/parity/test_precision.py": ("dp=2,fsdp=2-fp32",),
}


def is_slow(node_id: str) -> bool:
    """Whether CI runs it, and `make test` does not."""
    return node_id.startswith(SLOW) or _is_cell(node_id, SLOW_CELLS)


def is_soak(node_id: str) -> bool:
    """Whether only `make test-all` runs it."""
    return node_id.startswith(SOAK) or _is_cell(node_id, SOAKED_CELLS)


def _is_cell(node_id: str, cells: Mapping[str, Sequence[str]]) -> bool:
    file, _, test = node_id.partition("::")
    return any(test.endswith(f"[{cell}]") for cell in cells.get(file, ()))
