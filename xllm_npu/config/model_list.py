"""Several models in one server: what is set for one of them alone, and what must hold between them.

A server's models are named by repeating MODEL or --model, or by the key `models` of the configuration file, a list
whose entries are settings of one model each. What stands in an entry wins over what is set for all models, wherever
that was set. Knows names and settings, no devices.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from xllm_npu.config.aliases import ALIASES
from xllm_npu.config.errors import SettingsError
from xllm_npu.config.layer import COMMAND_LINE, FILE, Layer, build_layer
from xllm_npu.config.names import Given, flag
from xllm_npu.config.settings import Settings, served_model_names, setting_fields, spans_machines
from xllm_npu.config.values import split_list

ONE_MODEL_SECTIONS = ("model", "kv_cache", "scheduler", "execution", "lora", "profile", "parallel")
NAMES = "served_model_name"


def is_model(given: Given) -> bool:
    alias = ALIASES.get(given.name)
    return given.name == "model" or (alias is not None and alias.target == "model")


def repeated_models(given: Sequence[Given]) -> list[Given]:
    """The models that a command line names, if it names several by one spelling; else nothing."""
    models = [item for item in given if is_model(item)]
    spellings = {item.spelled for item in models}
    return models if len(models) > 1 and len(spellings) == 1 else []


def layers_of_flags(models: Sequence[Given]) -> list[Layer]:
    return [build_layer(COMMAND_LINE, [model]) for model in models]


def layers_of_file(entries: Sequence[Sequence[Given]]) -> list[Layer]:
    """Of the key `models`. Raises SettingsError for what cannot be set for one model alone."""
    layers, problems = list[Layer](), list[str]()
    for index, entry in enumerate(entries):
        layer = build_layer(FILE, entry)
        for name, given in layer.values.items():
            section = setting_fields()[name].section
            if section not in ONE_MODEL_SECTIONS and name != NAMES:
                problems.append(f"{given.spelled} is set for all models together: move it out of models.")
        if "model" not in layer.values:
            where = entry[0].spelled.rpartition(".")[0] if entry else f"models[{index}]"
            problems.append(f'{where} needs a "model".')
        layers.append(layer)
    if problems:
        raise SettingsError(problems)
    return layers


def share_names(layers: Sequence[Layer], given: Given | None) -> None:
    """Names that are given for all models are one for each, in their order."""
    if given is None or len(layers) < 2:
        return
    names: tuple[Any, ...] = split_list(given.value)
    if len(names) != len(layers):
        raise SettingsError(f"{given.spelled} gives {len(names)} names to {len(layers)} models: it takes one for each, "
                            'in their order. (More than one for a model: "served_model_name" in an entry of the '
                            "configuration file's models.)")  # fmt: skip
    for layer, name in zip(layers, names):
        layer.values.setdefault(NAMES, Given(NAMES, [name], given.spelled))


def broken_list_rules(models: Sequence[Settings]) -> list[str]:
    """What keeps these models from being served together, in sentences."""
    if len(models) < 2:
        return [*_sleepers(models)]
    return [*_equal_names(models), *_one_machine(models), *_sizes(models), *_sleepers(models)]


def _equal_names(models: Sequence[Settings]) -> Iterator[str]:
    seen = set[str]()
    for name in [name for settings in models for name in _names(settings)]:
        if name in seen:
            yield (f"Two models would be called {name}: give each a name of its own, by --served-model-name with one "
                   'for each, or by "served_model_name" in its entry of the configuration file\'s models.')
        seen.add(name)


def _names(settings: Settings) -> list[str]:
    return [*served_model_names(settings), *(module.name for module in settings.lora.lora_modules)]


def _one_machine(models: Sequence[Settings]) -> Iterator[str]:
    if spans_machines(models[0]):
        yield "Several models are for one machine in this version: leave --nnodes and --placement out."


def _sizes(models: Sequence[Settings]) -> Iterator[str]:
    """A share of the memory that is free would be all of it for the model that comes first."""
    for index, settings in enumerate(models):
        kv, others = settings.kv_cache, [*models[:index], *models[index + 1 :]]
        elastic = kv.enable_vmm_kvcache and kv.vmm_elastic
        if kv.max_cache_size or elastic or not any(share_a_device(settings, other) for other in others):
            continue
        name = served_model_names(settings)[0]
        yield (f"The model {name} shares its device with another, so its KV cache needs a size: set --max-cache-size, "
               "such as 2GiB, or let caches grow and shrink with --enable-vmm-kvcache --vmm-elastic.")


def _sleepers(models: Sequence[Settings]) -> Iterator[str]:
    service = models[0].service
    if not any(settings.kv_cache.enable_vmm_weights for settings in models):
        for name in ("auto_wakeup", "evict_idle_models"):
            if getattr(service, name):
                yield f"{flag(name)} needs a model that can sleep: set --enable-vmm-weights."


def share_a_device(one: Settings, other: Settings) -> bool:
    """As far as settings say it: the numbers of devices may mean different ones on different platforms."""
    if "cpu" in (one.execution.platform, other.execution.platform):
        return one.execution.platform == other.execution.platform
    return bool(_devices(one) & _devices(other))


def _devices(settings: Settings) -> set[int]:
    first = max(settings.execution.device_id, 0)
    return set(range(first, first + settings.parallel.tp_size * settings.parallel.dp_size))
