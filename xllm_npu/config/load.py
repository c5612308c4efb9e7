"""From what the user gave to one `Settings`: command line over environment over JSON file over default."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource

from xllm_npu.config.errors import SettingsError
from xllm_npu.config.explain import explain
from xllm_npu.config.flags import parse_flags
from xllm_npu.config.layer import (
    ARGUMENT,
    COMMAND_LINE,
    DEFAULT,
    ENVIRONMENT,
    FILE,
    Layer,
    LayerSource,
    build_layer,
)
from xllm_npu.config.model_list import (
    NAMES,
    broken_list_rules,
    is_model,
    layers_of_file,
    layers_of_flags,
    repeated_models,
    share_names,
)
from xllm_npu.config.names import Given, canonical, is_boolean, nearest
from xllm_npu.config.rules import broken_rules
from xllm_npu.config.section import Section
from xllm_npu.config.settings import Settings, flat_values, section_types, setting_fields
from xllm_npu.config.sources import read_environment, read_json_file

Options = TypeVar("Options", bound=Section)


class Source(NamedTuple):
    """Where an effective value came from."""

    kind: str  # command line | argument | environment | file | default
    spelled: str = ""  # what stood there: --max-num-seqs, XLLM_NPU_PORT, demo.json: port


@dataclass(frozen=True, slots=True)
class Loaded:
    settings: Settings  # of the first model, and of the server
    sources: dict[str, Source]  # every setting's name -> where its value came from
    others: tuple[Settings, ...] = ()  # of further models; what is the server's is the same in all

    @property
    def models(self) -> tuple[Settings, ...]:
        return (self.settings, *self.others)

    def given(self) -> dict[str, Any]:
        """The settings that are not left to their default, flat: what `LLM(**given)` takes to be set like this.

        The file that some of them came from is not among them: it has been read.
        """
        return {
            name: value
            for name, value in flat_values(self.settings).items()
            if self.sources[name].kind != DEFAULT and name != "config_json_file"
        }


def load(
    argv: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    *,
    options: type[Section] | None = None,
    several_models: bool = False,
) -> tuple[Loaded, Section | None]:
    """Read flags and MODELs, environment and JSON file; `options` are the verb's own flags.

    `environment` None is this process's. Raises SettingsError with every problem found, and for more than one model
    unless `several_models`.
    """
    environment = os.environ if environment is None else environment
    extra = dict(options.model_fields) if options else {}
    parsed = parse_flags(argv, extra)
    mine = [given for given in parsed.given if given.name in extra]
    own = _build_options(options, mine) if options else None
    given = [*(Given("model", model, "MODEL") for model in parsed.positionals),
             *(item for item in parsed.given if item.name not in extra)]  # fmt: skip
    models = repeated_models(given)
    if models and not several_models:
        hint = " (Lists are comma-separated: --served-model-name a,b.)" if models[0].spelled == "MODEL" else ""
        names = " and ".join(str(model.value) for model in models)
        raise SettingsError(f"One {models[0].spelled} is enough, got {names}: only a server takes several.{hint}")
    if models:
        given = [item for item in given if not is_model(item)]
    loaded = _load_layers(build_layer(COMMAND_LINE, given), environment, layers_of_flags(models))
    return (loaded if several_models else _only_one(loaded)), own


def _only_one(loaded: Loaded) -> Loaded:
    if loaded.others:
        path = loaded.settings.files.config_json_file
        raise SettingsError(f"{path}: models has {len(loaded.models)} entries, and only a server takes several.")
    return loaded


def load_settings(argv: Sequence[str] = (), environment: Mapping[str, str] | None = None) -> Settings:
    return load(argv, environment)[0].settings


def settings_sources(argv: Sequence[str] = (), environment: Mapping[str, str] | None = None) -> dict[str, Source]:
    return load(argv, environment)[0].sources


def settings_from_kwargs(
    *, config_json_file: str | None = None, environment: Mapping[str, str] | None = None, **overrides: Any
) -> Settings:
    """For `LLM(...)`: keyword arguments take the place of the command line; None means not given."""
    if config_json_file is not None:
        overrides["config_json_file"] = config_json_file
    given, problems = list[Given](), list[str]()
    for key, value in overrides.items():
        name = canonical(key)
        if is_boolean(name, {}) is None:
            close = nearest(name)
            problems.append(f"There is no setting {key}." + (f" Did you mean {close}?" if close else ""))
        elif value is not None:
            given.append(Given(name, value, key))
    if problems:
        raise SettingsError(problems)
    layer = build_layer(ARGUMENT, given)
    return _only_one(_load_layers(layer, os.environ if environment is None else environment)).settings


def _build_options(options: type[Options], given: list[Given]) -> Options:
    values: dict[str, Any] = {}
    for item in given:
        if getattr(options.model_fields[item.name].annotation, "__origin__", None) is tuple:
            values.setdefault(item.name, []).append(item.value)
        else:
            values[item.name] = item.value
    try:
        return options(**values)
    except ValidationError as error:
        by_name = {item.name: item for item in given}
        raise SettingsError(explain(error, options.model_fields, by_name)) from None


def _load_layers(top: Layer, environment: Mapping[str, str], models: Sequence[Layer] = ()) -> Loaded:
    """`models`: what each of several models has for itself."""
    layers = [top, build_layer(ENVIRONMENT, read_environment(environment))]
    path = next((str(layer.values[name].value) for layer in layers for name in ["config_json_file"]
                 if name in layer.values and layer.values[name].value), None)  # fmt: skip
    if path is not None:
        content = read_json_file(path)
        layers.append(build_layer(FILE, content.given))
        if content.models:
            _refuse_other_models(path, [*models, *layers])
            models = layers_of_file(content.models)
    share_names(models, next((at.values[NAMES] for at in layers if NAMES in at.values), None))
    loaded, problems = list[Loaded](), list[str]()
    for own in [[model] for model in models] or [[]]:
        one, broken = _one_model([*own, *layers])
        loaded.append(one)
        problems += broken
    settings = tuple(one.settings for one in loaded)
    if problems := list(dict.fromkeys(problems or broken_list_rules(settings))):
        raise SettingsError(problems)
    return Loaded(settings[0], loaded[0].sources, settings[1:])


def _refuse_other_models(path: str, layers: Sequence[Layer]) -> None:
    for layer in layers:
        if "model" in layer.values:
            other = layer.values["model"].spelled
            raise SettingsError(f"{other} and {path}: models both say what to serve; give one of them.")


def _one_model(layers: Sequence[Layer]) -> tuple[Loaded, list[str]]:
    """The settings of one model, and the rules that they break."""
    winners = {name: (layer.kind, given) for layer in reversed(layers) for name, given in layer.values.items()}
    settings = _validate(layers, {name: given for name, (_, given) in winners.items()})
    sources = {name: Source(DEFAULT) for name in setting_fields()}
    sources |= {name: Source(kind, given.spelled) for name, (kind, given) in winners.items()}
    broken = broken_rules(settings, {name: given.spelled for name, (_, given) in winners.items()})
    return Loaded(settings, sources), broken


def _validate(layers: Sequence[Layer], given: Mapping[str, Given]) -> Settings:
    class Layered(Settings):
        @classmethod
        def settings_customise_sources(
            cls,
            settings_cls: type[BaseSettings],
            *_sources: PydanticBaseSettingsSource,
            **_named: PydanticBaseSettingsSource,
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            return tuple(LayerSource(settings_cls, layer) for layer in layers)

    fields: dict[str, FieldInfo] = {name: item.info for name, item in setting_fields().items()}
    try:
        merged = Layered()
    except ValidationError as error:
        raise SettingsError(explain(error, fields, given)) from None
    return Settings(**{section: getattr(merged, section) for section in section_types()})
