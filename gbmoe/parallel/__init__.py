"""Experts spread over the ranks of a process group: rows travel to the ranks that hold their experts (dispatch), and sums travel back
(combine).

Inside a node peer_experts.py computes with rows that peer_transport.py pulls from the memory of the ranks that own them, and pushes sums
back into it. peer_memory.py holds that memory and the barrier between its ranks; notice_board.py tells all ranks that one has left a pass
early; arrival.py collects what must be known of all ranks' tokens before their rows are pulled, and late_report.py what nobody waits for.
Where more rows may come than there is room for, windows.py divides them, and further_windows.py computes all but the first part.
Where ranks lend each other experts for a step, the device decides which (gbmoe/plain/plain_loans.py); loans.py says what a loan costs and
reads what was decided, and lent_experts.py moves weights and their gradients.
Everywhere else exchange.py moves rows through torch.distributed's all-to-all (NCCL on GPUs, gloo on CPUs);
separate_steps.py is the same exchange as functions that a schedule calls one by one;
shadowing.py copies popular experts to all ranks for a step in which less then travels.
gbmoe.layers.expert_parallelism chooses between mapped memory and the exchange.

host_copy.py waits for tensors that depend on all ranks. groups.py finds out which ranks form a node; agreement.py compares what has to be
the same on all ranks, such as arguments, and pass_agreement.py the passes that they make; roll_call.py, which ranks are missing when a
collective fails. cost_model.py predicts what an exchange costs, and automatic_chunks.py chooses the number of chunks by it. placement.py
says which rank holds which experts. training.py has what such a model needs in training: gradients, clipping and checkpoints.
"""

from gbmoe.parallel.agreement import require_same_on_all_ranks
from gbmoe.parallel.exchange import experts_by_exchange
from gbmoe.parallel.groups import Nodes, nodes_of
from gbmoe.parallel.peer_experts import peer_experts
from gbmoe.parallel.peer_memory import check_passes, release
from gbmoe.parallel.placement import Placement
from gbmoe.parallel.separate_steps import Dispatched, check_steps, combine, dispatch

__all__ = ["Dispatched", "Nodes", "Placement", "check_passes", "check_steps", "combine", "dispatch", "experts_by_exchange", "nodes_of",
           "peer_experts", "release", "require_same_on_all_ranks"]
