"""A disk that fails, for tests."""

import os


class Failing:
    """A stand-in for a function of `os`: the n-th call fails, after half of what it was to write."""

    def __init__(self, function, number, code):
        self.function, self.left, self.code = function, number, code

    def __call__(self, *arguments):
        self.left -= 1
        if self.left >= 0:
            return self.function(*arguments)
        if self.function.__name__ == "write":
            descriptor, data = arguments
            self.function(descriptor, bytes(data)[: len(data) // 2])
        raise OSError(self.code, os.strerror(self.code))
