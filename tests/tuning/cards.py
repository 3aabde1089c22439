"""GPUs by what choices know of them, and any GPU with 66 to 160 multiprocessors, for hypothesis."""

from hypothesis import strategies as st

from gbmoe.tuning.device import Device

MIB = 1 << 20
H100, H200 = Device(132, 50 * MIB, (9, 0)), Device(132, 60 * MIB, (9, 0))
H100_PCIE, H20 = Device(114, 50 * MIB, (9, 0)), Device(78, 60 * MIB, (9, 0))
A100, L40S, V100 = Device(108, 40 * MIB, (8, 0)), Device(142, 96 * MIB, (8, 9)), Device(80, 6 * MIB, (7, 0))
B200 = Device(148, 126 * MIB, (10, 0))
LARGE = Device(160, 60 * MIB, (9, 0))
HOPPER = (H100, H200, H100_PCIE, H20, LARGE)
CARDS = (*HOPPER, A100, L40S, V100, B200)

multiprocessors = st.integers(66, 160)
hoppers = st.builds(Device, multiprocessors, st.sampled_from([50 * MIB, 60 * MIB]), st.just((9, 0)))
others = st.builds(Device, multiprocessors, st.sampled_from([6 * MIB, 40 * MIB, 50 * MIB, 60 * MIB, 96 * MIB]),
                   st.sampled_from([(7, 5), (8, 0), (8, 6), (12, 0)]))
devices = st.one_of(hoppers, st.sampled_from(CARDS), others)


def card_id(value):
    """A parameter's name: that of a card, and of everything else pytest's own."""
    return next((name for name, card in globals().items() if card is value), None) if isinstance(value, Device) else None
