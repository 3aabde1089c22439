class DType:
    def __init__(self, dtype):
        self.dtype = dtype

    @classmethod
    def from_pt(cls, dtype):
        return cls(dtype)

    def as_pt(self):
        return self.dtype
