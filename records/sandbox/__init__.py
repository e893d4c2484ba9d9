"""What a record's process sees and may use, how it is asked, and whose fault it is where that fails."""


class NoSandbox(Exception):
    """This machine cannot run foreign code: there is no sandbox. It says nothing of the record."""


class MachineFull(NoSandbox):
    """This machine has no memory left. It says nothing of the record."""


class SandboxError(Exception):
    """The record broke a limit or the protocol, raised, or died. `kind` says which."""

    def __init__(self, kind: str, message: str):
        super().__init__(message)
        self.kind = kind
