"""The simulator itself: device memory is freed and reused in the order of the compute stream."""

import torch
from parts import NUM_BYTES, SIZE, Machine, is_all, is_poison
from torch import Tensor


def test_new_memory_is_poison_and_used_memory_is_reused_as_it_was_left():
    machine = Machine(compute="early")
    tensor = machine.tensor()
    assert is_poison(tensor)
    tensor.fill_(1.0)
    address = tensor.data_ptr()
    del tensor
    again = machine.device.empty((6,), torch.float32)
    assert again.data_ptr() == address
    assert is_all(again, 1.0)
    assert machine.memory.allocated_bytes == NUM_BYTES


def test_a_view_keeps_memory_alive():
    machine = Machine()
    tensor = machine.tensor()
    view = tensor[1:]
    del tensor
    assert machine.device.empty(SIZE, torch.float32).data_ptr() != view.data_ptr() - 12


def test_queued_work_does_not_keep_memory_alive_and_finishes_before_the_next_owner():
    machine = Machine()
    result = machine.tensor()
    temporary = machine.tensor(1.0)
    machine.device.run(Tensor.copy_, result, temporary)
    address = temporary.data_ptr()
    del temporary
    next_owner = machine.tensor(2.0)
    assert next_owner.data_ptr() == address
    assert is_all(machine.device.read(result), 1.0)
    assert is_all(next_owner, 2.0)


def test_reuse_while_a_copy_still_reads_is_seen():
    machine = Machine(compute="early")
    transfer = machine.to_host(machine.tensor(1.0))
    target, ticket = transfer.tensor, transfer.ticket
    del transfer
    machine.tensor(2.0)
    ticket.wait()
    assert not is_all(target, 1.0)


def test_queued_writes_do_not_count_as_the_callers():
    machine = Machine()
    weight = torch.nn.Parameter(torch.zeros(SIZE))
    machine.device.run(Tensor.fill_, weight.detach(), 1.0)
    machine.device.mark().wait()
    assert is_all(weight, 1.0)
    assert weight._version == 0
