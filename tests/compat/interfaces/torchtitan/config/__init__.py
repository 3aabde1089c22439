"""torchtitan.config, as far as an override needs it, and what --override.imports does with the fields of a configuration."""

import importlib
from dataclasses import dataclass, field, fields
from typing import ClassVar

REGISTRY = {}


class Configurable:
    @dataclass(kw_only=True, slots=True)
    class Config:
        _owner: ClassVar[type | None] = None

        def build(self):
            return self._owner(config=self)

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        if "Config" in cls.__dict__:
            assert "__slots__" in cls.Config.__dict__, "@dataclass(kw_only=True, slots=True)"
            cls.Config._owner = cls


def override(*, target, fqns=None, description="", exact=False):
    assert issubclass(target, Configurable.Config) and fqns is None

    def register(function):
        REGISTRY[f"{function.__module__}.{function.__name__}"] = (target, exact, function)
        return function

    return register


def derive(source, target_cls, **deltas):
    shared = {each.name for each in fields(target_cls)} & {each.name for each in fields(source)}
    return target_cls(**{name: getattr(source, name) for name in shared} | deltas)


@dataclass
class OverrideConfig:
    imports: list = field(default_factory=list)


def apply_overrides(override_config, config_root):
    done = []
    for entry in override_config.imports:
        name, arguments = entry if isinstance(entry, tuple) else (entry, {})
        importlib.import_module(name.rpartition(".")[0])
        target, exact, function = REGISTRY[name]
        for each in fields(config_root):
            config = getattr(config_root, each.name)
            if type(config) is target if exact else isinstance(config, target):
                setattr(config_root, each.name, function(config, **arguments))
                done.append(each.name)
    return done
