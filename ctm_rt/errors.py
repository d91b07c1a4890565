"""The errors that ctm_rt raises on purpose; each is also the built-in a stranger would catch."""


class CtmError(Exception):
    """Everything that ctm_rt raises on purpose."""


class HeaderError(CtmError, ValueError):
    """A generated header, or what is to be filled into its descriptors, is not as expected."""


class ModuleError(CtmError, LookupError):
    """A module is missing, stale, damaged, or built for another arch or host."""


class ArgumentError(CtmError, ValueError):
    """The caller broke the contract; nothing was launched.

    Parameters
    ----------
    name : str
        The argument, as the public function names it.
    expected, got : object
        What the contract asks for and what came, both from the values that were compared.
    """

    def __init__(self, name: str, expected: object, got: object) -> None:
        super().__init__(f"{name}: expected {expected}, got {got}")
        self.name = name


class DriverError(CtmError, RuntimeError):
    """The CUDA driver refused a call.

    Parameters
    ----------
    call : str
        The driver's function, or the module's C entry.
    code, reason : str
        The driver's name for the error, and its text.
    """

    def __init__(self, call: str, code: str, reason: str) -> None:
        super().__init__(f"{call} failed: {code} ({reason})")
        self.code = code


class ToolError(CtmError, RuntimeError):
    """A program that ctm_rt runs is missing, or failed."""


class CapacityError(CtmError, MemoryError):
    """Slots or pages have run out; nothing was changed, and evicting makes room.

    Parameters
    ----------
    what : str
        What has run out.
    wanted, free : int
        How many the call needed, and how many there are.
    """

    def __init__(self, what: str, wanted: int, free: int) -> None:
        super().__init__(f"{what}: wanted {wanted}, {free} free")
        self.wanted, self.free = wanted, free
