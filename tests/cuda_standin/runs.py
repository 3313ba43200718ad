"""Which tests of `tests/run` run on the CUDA stand-in, and which of those folders cannot, each with its reason.

They name no device: `tests.device.on_default` makes the stand-in torch's default device.
"""

from collections.abc import Mapping, Sequence

_HABITS = "tests/run/habits"

RUNS: Sequence[str] = (_HABITS, "tests/run/optim/test_updates.py")
"""The folder and the file that run with late copies."""

NEWER: Sequence[str] = (
    "tests/run/graph/test_frozen_weights.py",
    "tests/run/optim/test_masters_of_classes.py",
    "tests/run/optim/test_state_on_disk.py",
    "tests/run/optim/test_trained_on_disk.py",
    "tests/run/optim/test_whole_habits.py",
    "tests/run/optim/test_whole_updates.py",
    "tests/run/runtime/test_params_on_disk.py",
    "tests/run/session/test_weights_of_files.py",
)
"""Files of frozen weights, classes that update whole tensors, and files on disk. Some of their tests compare tensors
across devices or have budgets of a CPU: on an H200 186 of 239 passed."""

MOMENTS: Sequence[str] = tuple(
    f"{_HABITS}/test_gradients.py::test_{name}"
    for name in (
        "the_gradient_of_an_input_leaves_those_of_parameters_alone",
        "a_backward_for_inputs_alone_leaves_parameters_alone",
        "pgd",
        "fgsm_by_a_full_backward",
        "the_gradient_of_an_output",
        "a_backward_for_the_head_alone",
        "gradients_of_all_parameters_are_returned",
        "gradient_surgery",
        "gradients_per_sample",
        "gan_by_inputs",
        "gan_by_freezing",
        "policy_and_reference",
        "self_distillation",
        "two_losses_at_once",
        "two_losses_one_after_the_other",
        "a_hook_on_a_parameter",
        "a_step_in_a_hook",
        "sharpness_aware_minimization",
        "accumulation_with_zeroed_gradients",
        "freezing_and_thawing",
    )
)
"""Small tests that run with copies at every moment that the stand-in knows, with all parameters on the host."""

CANNOT_RUN: Mapping[str, Sequence[str]] = {
    "a parameter whose home is the host, read as `module.weight` between steps, is a copy on the device: it has no "
    "gradient, is not the Parameter, and does not take what is written to it": (
        f"{_HABITS}/test_gradients.py::test_gradients_replaced_before_the_step[offload",
        f"{_HABITS}/test_gradients.py::test_gradients_of_some_tensors_are_returned[offload",
        f"{_HABITS}/test_lazy_bits.py::test_a_parameter_and_its_conjugate_stay_in_one_memory",
        f"{_HABITS}/test_modules.py::test_a_copy_as_teacher",
        f"{_HABITS}/test_modules.py::test_known_parametrizations_between_steps",
        f"{_HABITS}/test_modules.py::test_low_rank_adapters[offload",
        f"{_HABITS}/test_modules.py::test_norms_by_hooks_between_steps",
        f"{_HABITS}/test_modules.py::test_parametrizing_between_steps[offload",
        f"{_HABITS}/test_modules.py::test_pruning_between_steps[offload",
        f"{_HABITS}/test_modules.py::test_removing_a_parametrization",
        f"{_HABITS}/test_parameters.py::test_a_parameter_replaced_while_a_forward_waited_is_freed_behind_its_backward",
        f"{_HABITS}/test_parameters.py::test_assigning_to_tied_weights",
        f"{_HABITS}/test_parameters.py::test_parameters_that_share_memory_late_stay_whole_after_the_refusal",
        f"{_HABITS}/test_parameters.py::test_replacing_between_forward_and_backward",
        f"{_HABITS}/test_parameters.py::test_two_parameters_over_one_memory_later",
        f"{_HABITS}/test_parameters.py::test_tying_late_and_untying[offload",
        f"{_HABITS}/test_parameters.py::test_writes_between_steps",
        f"{_HABITS}/test_written_in_forward.py::test_a_weight_written_between_graphs[offload",
    ),
    "tensors made of parameters on the host meet tensors on the device: copies of models, averages, teachers": (
        f"{_HABITS}/test_checkpoint_habits.py::test_the_best_copy_of_a_model_is_evaluated_and_loaded_back",
        f"{_HABITS}/test_gradients.py::test_a_gradient_penalty_on_a_plain_copy[offload",
        f"{_HABITS}/test_gradients.py::test_first_order_meta_learning[offload",
        f"{_HABITS}/test_lazy_bits.py::test_updates_read_the_values_of_gradients_with_a_bit",
        f"{_HABITS}/test_modules.py::test_averaged_weights[offload",
        f"{_HABITS}/test_modules.py::test_statistics_of_batch_norm",
        f"{_HABITS}/test_optimizers_habits.py::test_an_ema_by_hand",
        f"{_HABITS}/test_optimizers_habits.py::test_lookahead",
        f"{_HABITS}/test_parameters.py::test_conversions_that_change_nothing",
    ),
    "`GradScaler` copies its scale to gradients on the host without waiting": (
        f"{_HABITS}/test_autocast.py::test_a_scaler_with_autocast_trains_under_a_tight_budget",
    ),
    "random numbers for a parameter on the host are those of the host's generator": (
        f"{_HABITS}/test_optimizers_habits.py::test_gradients_are_changed_before_the_step",
    ),
    "the autograd node of a parameter that moves to the host is another, so hooks on the node are refused": (
        f"{_HABITS}/test_gradients.py::test_a_hook_on_an_accumulate_node[offload",
        f"{_HABITS}/test_gradients.py::test_a_hook_on_several_parameters",
    ),
    "`torch.set_default_device`, also of the CPU: Dynamo breaks the graph or its own guard, or counts steps on CUDA": (
        f"{_HABITS}/test_optimizers_habits.py::test_a_class_with_a_compiled_function[across_steps",
        f"{_HABITS}/test_optimizers_habits.py::test_flags[offload",
        f"{_HABITS}/test_tensor_subclasses.py::test_a_tensor_subclass_trains_as_by_torch",
        f"{_HABITS}/test_transforms.py::test_a_function_transform_trains_as_by_torch[hessian",
        f"{_HABITS}/test_checkpoint_habits.py::test_a_thread_compiles_and_trains",
    ),
    "`torch.set_default_device`, and for a cause that is not known: graph breaks, and containers compiled in place": (
        f"{_HABITS}/test_budgets.py::test_a_model_of_which_nothing_is_captured_trains_and_is_warned_of[True",
        f"{_HABITS}/test_budgets.py::test_code_between_graphs_under_a_budget[disabled",
        f"{_HABITS}/test_transforms.py::test_nested_regions[graph breaks between",
    ),
    "forks a process that has CUDA": (
        f"{_HABITS}/test_checkpoint_habits.py::test_workers_of_a_data_loader_are_forked_in_mid_run",
    ),
    "ranks are processes on the CPU": (
        f"{_HABITS}/test_lazy_bits.py::test_ranks_share_parameters_with_a_bit",
        f"{_HABITS}/test_ranks_habits.py",
    ),
    "torch's optimizers refuse conjugates on CUDA, and the stand-in copies none to the device": (
        f"{_HABITS}/test_lazy_bits.py::test_parameters_with_a_bit_train_as_in_eager_code",
        f"{_HABITS}/test_lazy_bits.py::test_checkpoints_and_exports_hold_the_values",
    ),
    "the stand-in has no kernels for sparse tensors": (f"{_HABITS}/test_sparse.py",),
    "counts the bytes of tensors on the CPU": (
        f"{_HABITS}/test_budgets.py::test_a_step_is_measured_beside_what_others_keep",
        f"{_HABITS}/test_tensor_subclasses.py::test_the_measured_peak_keeps_the_budget_while_sequences_grow",
        f"{_HABITS}/test_tensor_subclasses.py::test_a_loss_outside_of_the_model_is_planned_around_at_once",
    ),
}
"""By reason, the tests that cannot run: a name, or the beginning of the names of all kinds of a test."""
