"""What must hold between settings, checked once at start. Each rule names the flags to change."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from xllm_npu.config.names import flag
from xllm_npu.config.settings import Settings, served_model_names

# A rule sees the settings and the spelling of those that the user gave (so not the defaults).
Rule = Callable[[Settings, Mapping[str, str]], Iterator[str]]


def broken_rules(settings: Settings, spelled: Mapping[str, str]) -> list[str]:
    return [problem for rule in RULES for problem in rule(settings, spelled)]


def _expert_parallel(settings: Settings, spelled: Mapping[str, str]) -> Iterator[str]:
    p = settings.parallel
    world, name = p.tp_size * p.dp_size, spelled.get("ep_size", "--ep-size")
    if p.enable_expert_parallel and "ep_size" in spelled and p.ep_size != world:
        both = spelled.get("enable_expert_parallel", "--enable-expert-parallel")
        yield f"{both} shares the experts among all {world} devices, and {name}={p.ep_size} among fewer: give one."
    elif world % p.expert_ranks:
        sizes = ", ".join(str(n) for n in range(1, world + 1) if world % n == 0)
        yield f"{name}={p.ep_size} must divide the {world} devices (tp_size * dp_size): use one of {sizes}."
    elif p.expert_parallel_degree == 2 and p.expert_ranks != world:
        degree = spelled.get("expert_parallel_degree", "--expert-parallel-degree")
        yield f"{degree}=2 needs experts shared among all {world} devices: set {name}={world}."


def _prefix_routing(settings: Settings, spelled: Mapping[str, str]) -> Iterator[str]:
    name = "enable_prefix_cache_aware_dp_routing"
    if settings.parallel.enable_prefix_cache_aware_dp_routing and not settings.kv_cache.enable_prefix_cache:
        yield f"{spelled.get(name, flag(name))} needs the prefix cache, which --enable-prefix-cache=false turns off."


def _expert_balance(settings: Settings, spelled: Mapping[str, str]) -> Iterator[str]:
    p, eplb = settings.parallel, spelled.get("enable_eplb", "--enable-eplb")
    if p.enable_eplb and p.expert_ranks == 1:
        yield f"{eplb} needs experts on several devices: set --ep-size above 1."
    for name in ("redundant_experts_num", "eplb_update_interval", "eplb_update_threshold"):
        if name in spelled and not p.enable_eplb and getattr(p, name) != type(p).model_fields[name].default:
            yield f"{spelled[name]} has no meaning without {eplb}."


def _node_rank(settings: Settings, spelled: Mapping[str, str]) -> Iterator[str]:
    d = settings.distributed
    if d.node_rank >= d.nnodes:
        yield f"--node-rank={d.node_rank} needs --nnodes above it; --nnodes is {d.nnodes}."


def _machines(settings: Settings, spelled: Mapping[str, str]) -> Iterator[str]:
    d, p = settings.distributed, settings.parallel
    world = p.tp_size * p.dp_size
    if d.placement == "ray" and d.nnodes > 1:
        yield f"--placement=ray finds its machines itself: leave {spelled.get('nnodes', '--nnodes')} out."
    elif d.nnodes > world:
        yield (f"--nnodes={d.nnodes} needs a rank for each machine: --tp-size={p.tp_size} times --dp-size={p.dp_size} "
               f"is {world}.")
    if d.node_rank > 0 and d.master_node_addr.rpartition(":")[0] in ("*", "0.0.0.0", "[::]"):
        yield f"--master-node-addr={d.master_node_addr} is no address to connect to: name that of node 0."


def _whole_prompt_fits_a_step(settings: Settings, spelled: Mapping[str, str]) -> Iterator[str]:
    s, longest = settings.scheduler, settings.model.max_model_len
    if not s.enable_chunked_prefill and longest is not None and longest > s.max_tokens_per_batch:
        yield (
            f"Without chunked prefill a whole prompt is one step: --max-model-len={longest} must be at most "
            f"--max-tokens-per-batch={s.max_tokens_per_batch}. Raise the latter or turn chunked prefill on."
        )


def _chunk_size(settings: Settings, spelled: Mapping[str, str]) -> Iterator[str]:
    s = settings.scheduler
    name = spelled.get("max_tokens_per_chunk_for_prefill", "--max-tokens-per-chunk-for-prefill")
    if s.max_tokens_per_chunk_for_prefill == 0:
        yield f"{name}=0 is out of range: it takes -1 (no limit but the step's) or a number from 1."
    elif s.max_tokens_per_chunk_for_prefill > 0 and not s.enable_chunked_prefill:
        yield f"{name} has no meaning with --enable-chunked-prefill=false; give one of them."


def _in_batch_prefix(settings: Settings, spelled: Mapping[str, str]) -> Iterator[str]:
    kv, name = settings.kv_cache, "enable_in_batch_prefix_cache"
    if name in spelled and kv.enable_in_batch_prefix_cache and not kv.enable_prefix_cache:
        yield f"{spelled[name]} needs the prefix cache, which --enable-prefix-cache=false turns off."


def _virtual_memory(settings: Settings, spelled: Mapping[str, str]) -> Iterator[str]:
    kv, vmm, elastic = settings.kv_cache, "--enable-vmm-kvcache", "--vmm-elastic"
    weights = spelled.get("enable_vmm_weights", "--enable-vmm-weights")
    if kv.vmm_elastic and not (kv.enable_vmm_kvcache or kv.enable_vmm_weights):
        yield f"{spelled.get('vmm_elastic', elastic)} has no meaning without {vmm} or {weights}."
    if kv.enable_vmm_weights and not (kv.enable_vmm_kvcache or kv.vmm_elastic):
        yield f"{weights} needs {elastic}, or {vmm} beside it."
    if kv.enable_vmm_weights and settings.parallel.enable_eplb:
        yield f"{weights} keeps weights where they are, and --enable-eplb moves them: give one of them."
    if kv.vmm_memory_reserve_bytes and not kv.vmm_elastic:
        name = "vmm_memory_reserve_bytes"
        yield f"{spelled.get(name, flag(name))} has no meaning without {elastic}."
    if not kv.max_memory_utilization and not (kv.enable_vmm_kvcache and kv.vmm_elastic):
        yield (f"{spelled.get('max_memory_utilization', '--max-memory-utilization')}=0, no limit, is for {vmm} with "
               f"{elastic}: a cache of fixed size needs a share above 0.")


def _tls(settings: Settings, spelled: Mapping[str, str]) -> Iterator[str]:
    s = settings.service
    if s.ssl_keyfile and not s.ssl_certfile:
        yield "--ssl-keyfile needs --ssl-certfile, the certificate that belongs to it."
    if s.ssl_certfile and not s.ssl_keyfile:
        yield "--ssl-certfile needs --ssl-keyfile, the private key that belongs to it."
    if s.ssl_ca_certs and not s.ssl_certfile:
        yield "--ssl-ca-certs needs --ssl-certfile and --ssl-keyfile: there is no HTTPS without them."
    for name in ("ssl_keyfile", "ssl_certfile", "ssl_ca_certs"):
        path = getattr(s, name)
        if path and not Path(path).expanduser().is_file():
            yield f"{spelled.get(name, flag(name))}={path}: there is no such file."


def _one_address(settings: Settings, spelled: Mapping[str, str]) -> Iterator[str]:
    s = settings.service
    both = [spelled[name] for name in ("host", "port") if name in spelled]
    if s.uds and both:
        uds = spelled.get("uds", "--uds")
        yield f"{uds} listens on a file instead of {' and '.join(both)}; give one of them."
    if s.uds and not Path(s.uds).expanduser().absolute().parent.is_dir():
        yield f"{spelled.get('uds', '--uds')}={s.uds}: its directory does not exist."


def _admin_address(settings: Settings, spelled: Mapping[str, str]) -> Iterator[str]:
    s = settings.service
    if s.admin_port and s.admin_port == s.port and not s.uds and s.host == s.admin_host:
        yield (f"{spelled.get('admin_port', '--admin-port')}={s.admin_port} is the port of the API too: "
               "choose another for one of them.")
    if "admin_host" in spelled and not s.admin_port:
        yield f"{spelled['admin_host']} has no meaning without --admin-port."
    if "wakeup_timeout" in spelled and not s.auto_wakeup:
        yield f"{spelled['wakeup_timeout']} has no meaning without --auto-wakeup."


def _root_path(settings: Settings, spelled: Mapping[str, str]) -> Iterator[str]:
    path = settings.service.root_path
    if path and (not path.startswith("/") or path.endswith("/")):
        yield f"{spelled.get('root_path', '--root-path')}={path} must begin with / and not end with it."


def _api_keys(settings: Settings, spelled: Mapping[str, str]) -> Iterator[str]:
    if any(not key.isascii() or any(c.isspace() for c in key) for key in settings.service.api_key):
        yield f"{spelled.get('api_key', '--api-key')}: a key is printable ASCII without spaces."


def _chat_template(settings: Settings, spelled: Mapping[str, str]) -> Iterator[str]:
    template = settings.model.chat_template
    if template and "{" not in template and not Path(template).expanduser().is_file():
        yield f"{spelled.get('chat_template', '--chat-template')}={template}: there is no such file."


def _tokenizer(settings: Settings, spelled: Mapping[str, str]) -> Iterator[str]:
    tokenizer = settings.model.tokenizer
    looks_local = tokenizer is not None and (tokenizer.startswith((".", "/", "~")) or tokenizer.count("/") > 1)
    if tokenizer and looks_local and not Path(tokenizer).expanduser().exists():
        yield f"{spelled.get('tokenizer', '--tokenizer')}={tokenizer}: there is no such directory."


def _lora(settings: Settings, spelled: Mapping[str, str]) -> Iterator[str]:
    lora = settings.lora
    modules = spelled.get("lora_modules", "--lora_modules")
    if not lora.enable_lora:
        for name in ("lora_modules", "allow_runtime_lora_updating"):
            if getattr(lora, name):
                yield f"{spelled.get(name, f'--{name}')} needs --enable_lora."
        return
    taken = set(served_model_names(settings))
    for module in lora.lora_modules:
        if module.name in taken:
            yield f"{modules}: an adapter cannot have the model's name, {module.name}."
    if len(lora.lora_modules) > lora.most_loaded:
        yield (f"{modules} names {len(lora.lora_modules)} adapters, and at most {lora.most_loaded} can be loaded: "
               "raise --max_cpu_loras.")
    if lora.max_cpu_loras and lora.max_cpu_loras < lora.max_loras:
        yield (f"{spelled.get('max_cpu_loras', '--max_cpu_loras')}={lora.max_cpu_loras} is less than --max_loras "
               f"{lora.max_loras}.")


RULES: tuple[Rule, ...] = (
    _expert_parallel, _expert_balance, _prefix_routing, _node_rank, _machines, _whole_prompt_fits_a_step,
    _chunk_size, _in_batch_prefix, _virtual_memory, _tls, _one_address, _admin_address, _root_path, _api_keys,
    _chat_template, _tokenizer, _lora,
)  # fmt: skip
