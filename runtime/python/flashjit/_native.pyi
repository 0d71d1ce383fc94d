from typing import Any, Callable

class Engine:
    def __new__(
        cls,
        device: str = "cpu",
        *,
        target: str | None = None,
        cache_dir: str | None = None,
        cache_path: str | None = None,
        cache_max_bytes: int = 0,
        num_threads: int = 0,
        policy: str = "heuristic",
        tune_seconds: float = 0,
        compile_seconds: float = 0,
        compile_bytes: int = 0,
        cache_remote: str | None = None,
        cache_trust: str | None = None,
        signing_key: str | None = None,
        store_configs: bool = False,
    ) -> Engine: ...
    def get(
        self,
        spec: Spec,
        /,
        *,
        batch: int = 1,
        seqlen_q: int = 1,
        seqlen_k: int = 1,
        num_heads_q: int = 1,
        num_heads_kv: int = ...,
        page_size: int = 0,
        total_q: int = 0,
        total_k: int = 0,
    ) -> Kernel: ...
    def _merge(self, stream: int | None, out: Any, parts_o: Any, parts_lse: Any, lse: Any, /) -> None: ...

class Spec:
    def __new__(cls, text_or_fields: str | dict[str, Any], /) -> Spec: ...
    @property
    def json(self) -> str: ...

class Kernel:
    @property
    def info(self) -> dict[str, Any]: ...
    def workspace_bytes(
        self,
        *,
        batch: int = 1,
        seqlen_q: int = 1,
        seqlen_k: int = 1,
        num_heads_q: int = 1,
        num_heads_kv: int = ...,
        page_size: int = 0,
        total_q: int = 0,
        total_k: int = 0,
    ) -> int: ...
    def launch(self, *, stream: int | None = None, **arguments: Any) -> None: ...
    def prepare(self, **arguments: Any) -> Prepared: ...

class Prepared:
    def launch(self, stream: int | None = None) -> None: ...

class Function:
    def __new__(
        cls,
        make: Callable[..., tuple[Engine, Spec, str]],
        names: tuple[str, ...],
        shown: tuple[str, ...],
        writes_o: bool,
        writes_lse: bool,
        kind_of: Callable[..., Any] | None,
        heads_first: bool = False,
        head_dim_v: int = 0,
        /,
    ) -> Function: ...

def call(function: Function, stream: int | None, out: Any, /, *arguments: Any) -> Any: ...
def attend(patterns: list[tuple[Any, ...]], arguments: tuple[Any, ...], keywords: dict[str, Any], /) -> Any: ...
def call_alone(function: Function, /, *arguments: Any) -> Any: ...
def describe(tensor: Any, name: str, /) -> tuple[tuple[int, ...], str, str]: ...
def empty_like(tensor: Any, shape: tuple[int, ...], dtype: str, /) -> Any: ...
def finished(like: Any, output: Any, /) -> Any: ...
def most_listed_blocks(
    block_m: int, block_n: int, per_head: bool, batch: int, heads: int, seqlen_q: int, seqlen_k: int, /
) -> int: ...
def version() -> str: ...
def xla_handlers() -> tuple[Any, Any]: ...
