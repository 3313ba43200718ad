"""Every use of a private or version-dependent name of torch, each with the versions it was checked on.

A docstring here names the torch versions, and says after "Gone:" what happens if the name is missing. Private names
are imported by the function that uses them, so a renamed name of torch breaks its function and not the import of the
package. No other room uses `torch._*`; `tests/house/test_names.py` has the exceptions, each with its reason.

    autograd        the running backward pass, and the hooks of a parameter
    compilers       the partitioner of AOTAutograd, Inductor and its kernels
    distributed     collectives, DTensors, checkpoint records, DistributedDataParallel, schedules of pipelines
    dynamo          captured graphs, guards, settings, the wrappers around compiled modules
    profiling       when the allocators took and freed memory
    tensors         storages, symbolic sizes, schemas, and a tensor made of its bytes
    platforms       the devices of one type, and the memory and cores of the host
"""

from elixir_compile.compat.autograd import AccumulateNode as AccumulateNode
from elixir_compile.compat.autograd import Asked as Asked
from elixir_compile.compat.autograd import after_backward as after_backward
from elixir_compile.compat.autograd import asked_for as asked_for
from elixir_compile.compat.autograd import backward_pass_id as backward_pass_id
from elixir_compile.compat.autograd import has_gradient_hooks as has_gradient_hooks
from elixir_compile.compat.autograd import has_hooks_before_accumulation as has_hooks_before_accumulation
from elixir_compile.compat.autograd import hooks_after_accumulation as hooks_after_accumulation
from elixir_compile.compat.autograd import is_batched as is_batched
from elixir_compile.compat.autograd import is_trial_of_scan as is_trial_of_scan
from elixir_compile.compat.autograd import keeps_tangents as keeps_tangents
from elixir_compile.compat.autograd import let_gradients_follow as let_gradients_follow
from elixir_compile.compat.autograd import outside_transforms as outside_transforms
from elixir_compile.compat.autograd import packs_saved_tensors as packs_saved_tensors
from elixir_compile.compat.autograd import saved_behind as saved_behind
from elixir_compile.compat.compilers import Kernels as Kernels
from elixir_compile.compat.compilers import Strides as Strides
from elixir_compile.compat.compilers import boxed as boxed
from elixir_compile.compat.compilers import compile_plainly as compile_plainly
from elixir_compile.compat.compilers import compile_with_aot_eager as compile_with_aot_eager
from elixir_compile.compat.compilers import compile_with_inductor as compile_with_inductor
from elixir_compile.compat.compilers import gradients_at as gradients_at
from elixir_compile.compat.compilers import gradients_in_subclasses_at as gradients_in_subclasses_at
from elixir_compile.compat.compilers import has_cpp_compiler as has_cpp_compiler
from elixir_compile.compat.compilers import inductor_random_ops as inductor_random_ops
from elixir_compile.compat.compilers import inputs_at as inputs_at
from elixir_compile.compat.compilers import inputs_that_must_be_real as inputs_that_must_be_real
from elixir_compile.compat.compilers import lower_plainly_with_inductor as lower_plainly_with_inductor
from elixir_compile.compat.compilers import lower_with_inductor as lower_with_inductor
from elixir_compile.compat.compilers import min_cut_partition as min_cut_partition
from elixir_compile.compat.compilers import report_forward as report_forward
from elixir_compile.compat.compilers import returned_writes as returned_writes
from elixir_compile.compat.compilers import timed_within as timed_within
from elixir_compile.compat.distributed import ScheduledStage as ScheduledStage
from elixir_compile.compat.distributed import active_ddp as active_ddp
from elixir_compile.compat.distributed import awaited_local_tensor as awaited_local_tensor
from elixir_compile.compat.distributed import default_timeout as default_timeout
from elixir_compile.compat.distributed import dtensor_like as dtensor_like
from elixir_compile.compat.distributed import dtensor_of as dtensor_of
from elixir_compile.compat.distributed import flat_collectives as flat_collectives
from elixir_compile.compat.distributed import group_size as group_size
from elixir_compile.compat.distributed import has_communication_hook as has_communication_hook
from elixir_compile.compat.distributed import is_cut_by_ddp as is_cut_by_ddp
from elixir_compile.compat.distributed import is_fully_sharded as is_fully_sharded
from elixir_compile.compat.distributed import is_in_data_parallel as is_in_data_parallel
from elixir_compile.compat.distributed import is_in_pipeline as is_in_pipeline
from elixir_compile.compat.distributed import joined_mesh as joined_mesh
from elixir_compile.compat.distributed import local_tensor as local_tensor
from elixir_compile.compat.distributed import reads_fully_sharded as reads_fully_sharded
from elixir_compile.compat.distributed import reduced_by as reduced_by
from elixir_compile.compat.distributed import scaled_sum as scaled_sum
from elixir_compile.compat.distributed import scheduled_runs as scheduled_runs
from elixir_compile.compat.distributed import scheduled_stages as scheduled_stages
from elixir_compile.compat.distributed import set_local_tensor as set_local_tensor
from elixir_compile.compat.distributed import storage_info as storage_info
from elixir_compile.compat.distributed import strided_shard as strided_shard
from elixir_compile.compat.dynamo import backend_of as backend_of
from elixir_compile.compat.dynamo import before_each_capture as before_each_capture
from elixir_compile.compat.dynamo import belongs_to_module as belongs_to_module
from elixir_compile.compat.dynamo import check_requires_grad as check_requires_grad
from elixir_compile.compat.dynamo import checks_class_of as checks_class_of
from elixir_compile.compat.dynamo import copy_of as copy_of
from elixir_compile.compat.dynamo import fake_mode_of as fake_mode_of
from elixir_compile.compat.dynamo import graph_break_of as graph_break_of
from elixir_compile.compat.dynamo import graph_module as graph_module
from elixir_compile.compat.dynamo import guard_by_identity as guard_by_identity
from elixir_compile.compat.dynamo import is_higher_order as is_higher_order
from elixir_compile.compat.dynamo import is_op_overload as is_op_overload
from elixir_compile.compat.dynamo import is_operator as is_operator
from elixir_compile.compat.dynamo import mark_dynamic as mark_dynamic
from elixir_compile.compat.dynamo import name_backend as name_backend
from elixir_compile.compat.dynamo import never_compile_alone as never_compile_alone
from elixir_compile.compat.dynamo import new_input as new_input
from elixir_compile.compat.dynamo import no_collection_at_end as no_collection_at_end
from elixir_compile.compat.dynamo import no_names_of_lines as no_names_of_lines
from elixir_compile.compat.dynamo import nothing_compiles as nothing_compiles
from elixir_compile.compat.dynamo import outside_captures as outside_captures
from elixir_compile.compat.dynamo import own_fake_mode as own_fake_mode
from elixir_compile.compat.dynamo import sets_gradients as sets_gradients
from elixir_compile.compat.dynamo import shapes_apart as shapes_apart
from elixir_compile.compat.dynamo import trace_again as trace_again
from elixir_compile.compat.dynamo import trace_artifact as trace_artifact
from elixir_compile.compat.dynamo import trace_each_region as trace_each_region
from elixir_compile.compat.dynamo import trace_past_logging as trace_past_logging
from elixir_compile.compat.dynamo import uncompiled_name as uncompiled_name
from elixir_compile.compat.dynamo import undo_compile as undo_compile
from elixir_compile.compat.profiling import AllocatorProfile as AllocatorProfile
from elixir_compile.compat.profiling import allocator_snapshot as allocator_snapshot
from elixir_compile.compat.profiling import can_profile as can_profile
from elixir_compile.compat.profiling import start_allocator_history as start_allocator_history
from elixir_compile.compat.profiling import stop_allocator_history as stop_allocator_history
from elixir_compile.compat.tensors import In4Bits as In4Bits
from elixir_compile.compat.tensors import LazyBits as LazyBits
from elixir_compile.compat.tensors import MemoryView as MemoryView
from elixir_compile.compat.tensors import Wrapping as Wrapping
from elixir_compile.compat.tensors import apply_to_tensors as apply_to_tensors
from elixir_compile.compat.tensors import bytes_of as bytes_of
from elixir_compile.compat.tensors import dense_parts as dense_parts
from elixir_compile.compat.tensors import drop_cublas_workspaces as drop_cublas_workspaces
from elixir_compile.compat.tensors import evaluate_size as evaluate_size
from elixir_compile.compat.tensors import expression_of as expression_of
from elixir_compile.compat.tensors import fake_tensors as fake_tensors
from elixir_compile.compat.tensors import foreach_writes as foreach_writes
from elixir_compile.compat.tensors import is_fake as is_fake
from elixir_compile.compat.tensors import is_in_4_bits as is_in_4_bits
from elixir_compile.compat.tensors import is_jagged as is_jagged
from elixir_compile.compat.tensors import is_lazy as is_lazy
from elixir_compile.compat.tensors import is_multiple as is_multiple
from elixir_compile.compat.tensors import is_profiling as is_profiling
from elixir_compile.compat.tensors import is_wrapper as is_wrapper
from elixir_compile.compat.tensors import lazy_bits as lazy_bits
from elixir_compile.compat.tensors import like_in_strides as like_in_strides
from elixir_compile.compat.tensors import may_have_any_value_from as may_have_any_value_from
from elixir_compile.compat.tensors import memory_address as memory_address
from elixir_compile.compat.tensors import num_holders as num_holders
from elixir_compile.compat.tensors import ops_seen_by as ops_seen_by
from elixir_compile.compat.tensors import plain_inside as plain_inside
from elixir_compile.compat.tensors import real_tensors as real_tensors
from elixir_compile.compat.tensors import schema_of as schema_of
from elixir_compile.compat.tensors import settled as settled
from elixir_compile.compat.tensors import stand_in as stand_in
from elixir_compile.compat.tensors import storage_key as storage_key
from elixir_compile.compat.tensors import symbol_of as symbol_of
from elixir_compile.compat.tensors import symbols_in as symbols_in
from elixir_compile.compat.tensors import unknown_number as unknown_number
from elixir_compile.compat.tensors import unwrapped as unwrapped
from elixir_compile.compat.tensors import uses_foreach as uses_foreach
from elixir_compile.compat.tensors import with_bits as with_bits
from elixir_compile.compat.tensors import with_cpu_blocks as with_cpu_blocks
