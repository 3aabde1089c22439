import contextlib


class CudaRNGStatesTracker:
    def __init__(self):
        self.reset()

    def reset(self):
        self.states_ = {}
        self._is_initialized = False

    def is_initialized(self):
        return self._is_initialized

    @contextlib.contextmanager
    def fork(self, name="model-parallel-rng"):
        if name not in self.states_:
            raise Exception(f"cuda rng state {name} is not added")
        yield


_TRACKER = CudaRNGStatesTracker()


def get_cuda_rng_tracker():
    return _TRACKER


def get_expert_parallel_rng_tracker_name():
    return "expert-parallel-rng"
