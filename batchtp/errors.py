"""Every error batchtp raises on purpose.

    BatchtpError
    ├── UsageError            the caller asked for something that cannot be done
    │   ├── SettingsError         a setting has a bad value or an unknown name
    │   ├── InputError            an input file cannot be submitted at all
    │   │   └── InvalidLinesError     --strict: one or more lines are bad (all are listed)
    │   ├── BatchNotFoundError    no such batch
    │   └── BatchConflictError    the batch id exists with other content
    ├── ServiceError          something batchtp depends on does not answer
    │   ├── BrokerUnavailableError
    │   ├── DatabaseUnavailableError
    │   ├── EmbeddedServiceError
    │   ├── SchemaError           the database schema is missing, older or newer
    │   └── NotAcceptedError      a submission was sent but not acknowledged in time
    ├── ModelError            a checkpoint cannot be served
    │   ├── ModelNotFoundError
    │   ├── UnsupportedModelError     the config asks for something the decoder cannot do
    │   ├── CheckpointError           a tensor or file is missing, malformed or of another shape
    │   └── TokenizerError            no usable tokenizer or chat template
    ├── EngineError           the tensor-parallel group
    │   ├── GroupStartError       ranks did not come up
    │   ├── GroupStoppedError     the group is stopped and takes no more work
    │   ├── RankFaultError        a rank died, hung or answered wrongly
    │   └── KernelInputError      a kernel was given tensors that it cannot compute with
    └── RequestError          one request fails by itself; carries the row's `code`

A message says what happened and what to do. `exit_code` is what the CLI returns.
"""

from __future__ import annotations


class BatchtpError(Exception):
    """Base of every error batchtp raises on purpose."""

    exit_code = 1


class UsageError(BatchtpError):
    """The caller asked for something that cannot be done."""

    exit_code = 2


class SettingsError(UsageError):
    """A setting has a bad value or an unknown name."""


class InputError(UsageError):
    """An input file cannot be submitted at all. `code` is the file-level code (empty_file, …)."""

    def __init__(self, message: str, code: str = "invalid_request") -> None:
        super().__init__(message)
        self.code = code


class InvalidLinesError(InputError):
    """--strict: the file has bad lines; `lines` lists every one as (line number, code, message)."""

    def __init__(self, message: str, lines: tuple[tuple[int, str, str], ...]) -> None:
        super().__init__(message, code="invalid_lines")
        self.lines = lines


class BatchNotFoundError(UsageError):
    """No such batch."""

    exit_code = 4


class BatchConflictError(UsageError):
    """The batch id exists already with other content."""

    exit_code = 4


class ServiceError(BatchtpError):
    """Something batchtp depends on does not answer."""

    exit_code = 5


class BrokerUnavailableError(ServiceError):
    """Redis/Valkey cannot be reached."""


class DatabaseUnavailableError(ServiceError):
    """Postgres cannot be reached."""


class EmbeddedServiceError(ServiceError):
    """The embedded Postgres or Valkey could not be started."""


class SchemaError(ServiceError):
    """The database schema is missing, older or newer than this program."""


class NotAcceptedError(ServiceError):
    """A submission was sent but its acceptance did not come in time."""


class ModelError(BatchtpError):
    """A checkpoint cannot be served."""

    exit_code = 6


class ModelNotFoundError(ModelError):
    """No model at that path, name or hub id."""


class UnsupportedModelError(ModelError):
    """The checkpoint's config asks for something the decoder cannot do."""


class CheckpointError(ModelError):
    """A tensor or file of the checkpoint is missing, malformed or of another shape."""


class TokenizerError(ModelError):
    """The checkpoint has no usable tokenizer or chat template."""


class EngineError(BatchtpError):
    """The tensor-parallel group cannot do its work."""

    exit_code = 7


class GroupStartError(EngineError):
    """The ranks of the group did not come up within their budget."""


class GroupStoppedError(EngineError):
    """The group is stopped and takes no more work."""


class RankFaultError(EngineError):
    """A rank died, hung or answered wrongly."""


class KernelInputError(EngineError):
    """A kernel was given tensors of a shape, dtype or device that it cannot compute with."""


class RequestError(BatchtpError):
    """One request fails by itself. `code` goes into its row, `param` names the field at fault."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param
