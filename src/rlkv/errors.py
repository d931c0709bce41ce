"""Every error a user of RLKV can meet.

Each class also inherits the built-in exception that fits it, so callers may catch either. A message
says what was found, what was expected and what to do; the command line prints it as one sentence.

Those that no machine and no other file could make right, such as an option out of range or an
unknown name, end a command with exit status 2, all others with 1 (``rlkv.cli.main``).
"""

from __future__ import annotations


class RLKVError(Exception):
    """Base of all errors that RLKV raises on purpose."""


class ConfigError(RLKVError, ValueError):
    """A setting is out of range, unknown, or contradicts another one."""


class UnknownNameError(RLKVError, KeyError):
    """A method, task or model name is not registered."""

    def __str__(self) -> str:  # KeyError would print the repr of the message
        return str(self.args[0]) if self.args else ""


class ProfileError(RLKVError, ValueError):
    """A head profile cannot be read, or its content is not valid."""


class ProfileMismatchError(ProfileError):
    """A head profile was made for another model."""


class UnsupportedModelError(RLKVError, NotImplementedError):
    """The model's attention cannot be split by KV head."""


class ModelError(RLKVError, OSError):
    """A model's files are missing or damaged, or cannot be fetched."""


class UnsupportedFeatureError(RLKVError, NotImplementedError):
    """A generation feature cannot be combined with a compressed cache."""


class PromptTooLongError(RLKVError, ValueError):
    """Prompt and completion together do not fit the model's position limit."""


class OutputError(RLKVError, OSError):
    """An output file or folder cannot be written."""


class MissingExtraError(RLKVError, ImportError):
    """An optional dependency is not installed, or not in the version that RLKV works with."""


class CheckpointError(RLKVError, ValueError):
    """A training checkpoint is missing, corrupt, or belongs to another run."""


class DataError(RLKVError, ValueError):
    """A file of data or settings is missing or damaged, or a row of it cannot be used."""


class SandboxError(RLKVError, RuntimeError):
    """Untrusted code cannot be confined on this system, so it is not run."""


class BackendError(RLKVError, RuntimeError):
    """Workers that run a job cannot be started, or failed for good."""
