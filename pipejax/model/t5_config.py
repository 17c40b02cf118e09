"""The T5 as a backbone: sizes, parameters and operation counts, and their names in Hugging Face's files.

The computation is in `pipejax.model.t5`. T5 v1.0, v1.1 (including Flan-T5 and ByT5) and mT5 are supported. Kernels are
[in, out] here and [out, in] in Hugging Face's files. Axes: V vocabulary, D width, F feed-forward width, H heads, I
inner width of all heads, B buckets. Importing this module does not import JAX.
"""

import dataclasses
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from pipejax import registry
from pipejax.model.backbone import Backbone
from pipejax.model.config_json import REQUIRED, Key, Keys, id_key, read_keys
from pipejax.system.errors import UserError, did_you_mean
from pipejax.system.fields import setting
from pipejax.system.strict_json import JsonMapping, JsonObject

if TYPE_CHECKING:
    import numpy as np

FEED_FORWARDS = {"relu": "relu", "gated-gelu": "gelu_new", "gated-silu": "silu"}  # -> transformers' dense_act_fn
# The keys of config.json, as transformers' T5Config reads them.
KEYS: Keys = {
    "model_type": Key(str, REQUIRED),
    "vocab_size": Key(int, 32128),
    "d_model": Key(int, 512, names=("hidden_size",)),
    "d_kv": Key(int, 64, names=("head_dim",)),
    "d_ff": Key(int, 2048),
    "num_heads": Key(int, 8, names=("num_attention_heads",)),
    "num_layers": Key(int, 6),
    "num_hidden_layers": Key(int, None),  # another name of num_layers, not a default of num_decoder_layers
    "num_decoder_layers": Key(int, None, null=None),  # None: as many as num_layers
    "relative_attention_num_buckets": Key(int, 32),
    "relative_attention_max_distance": Key(int, 128),
    "dropout_rate": Key(float, 0.1),
    "layer_norm_epsilon": Key(float, 1e-6),
    "feed_forward_proj": Key(str, "relu"),
    "dense_act_fn": Key(str, None),  # overrides feed_forward_proj, as does the next key
    "is_gated_act": Key(bool, None, null=False),
    "tie_word_embeddings": Key(bool, True, null=True),
    "scale_decoder_outputs": Key(bool, None, null=False),  # None: whether tie_word_embeddings is true
    "pad_token_id": id_key(0),
    "eos_token_id": id_key(1),
    "decoder_start_token_id": id_key(None),
}
# The keys of config.json, as transformers' MT5Config reads them.
MT5_KEYS: Keys = KEYS | {
    "vocab_size": Key(int, 250_112),
    "d_ff": Key(int, 1024),
    "num_heads": Key(int, 6, names=("num_attention_heads",)),
    "num_layers": Key(int, 8),
    "feed_forward_proj": Key(str, "gated-gelu"),
    "tie_word_embeddings": Key(bool, True),
    "decoder_start_token_id": id_key(0),
}
# Path within a sublayer, name in Hugging Face's files without ".weight", axes. `tensors` adds the prefix of the layer.
ATTENTION = (
    ("norm/scale", "layer_norm", "D"),
    ("query/kernel", "{}.q", "DI"),
    ("key/kernel", "{}.k", "DI"),
    ("value/kernel", "{}.v", "DI"),
    ("output/kernel", "{}.o", "ID"),
)
RELU = (("norm/scale", "layer_norm", "D"), ("wi/kernel", "{}.wi", "DF"), ("wo/kernel", "{}.wo", "FD"))
GATED = (RELU[0], ("wi_0/kernel", "{}.wi_0", "DF"), ("wi_1/kernel", "{}.wi_1", "DF"), RELU[2])
LAYERS = {
    "encoder": {"attention": "SelfAttention", "feed_forward": "DenseReluDense"},
    "decoder": {
        "self_attention": "SelfAttention",
        "cross_attention": "EncDecAttention",
        "feed_forward": "DenseReluDense",
    },
}
SHARED = ("shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight")  # names of one table
HEAD = "lm_head.weight"
# Very old files have this tensor, which T5 does not use.
UNUSED = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"


@dataclasses.dataclass(frozen=True)
class T5Config(Backbone):
    """The architecture of a T5 (names as in Hugging Face's config.json where one exists)."""

    vocab_size: int = setting(least=2, most=2**24)  # rows of the embedding table
    d_model: int = setting(least=1, most=2**16)  # width of the model
    d_kv: int = setting(least=1, most=2**12)  # width of an attention head
    d_ff: int = setting(least=1, most=2**18)  # inner width of the feed-forward layers
    num_heads: int = setting(least=1, most=2**10)  # attention heads
    num_layers: int = setting(least=1, most=2**10)  # layers of the encoder
    num_decoder_layers: int = setting(least=1, most=2**10)  # layers of the decoder
    relative_attention_num_buckets: int = setting(32, least=4, most=2**16)  # buckets of distances, each with a bias
    relative_attention_max_distance: int = setting(128, least=4)  # tokens farther away share the last bucket
    dropout_rate: float = setting(0.1, least=0.0, below=1.0)  # kept for Hugging Face; training uses train.dropout
    layer_norm_epsilon: float = setting(1e-6, above=0.0)  # added to the mean square under the root
    feed_forward: str = setting("relu", choices=tuple(FEED_FORWARDS))  # "gated-gelu": v1.1, Flan and mT5
    tied_head: bool = setting(True)  # the head is the embedding table (v1.0); False: lm_head/kernel (v1.1, mT5)
    scale_head: bool = setting(True)  # the decoder's output is multiplied by d_model**-0.5 before the head (v1.0)
    pad_token_id: int = setting(0, least=0)  # the padding of batches
    eos_token_id: int = setting(1, least=0)  # ends rows; it also ends sources if the tokenizer adds it
    decoder_start_token_id: int = setting(0, least=0)  # bos: the token with which every row begins
    other_eos_token_ids: tuple[int, ...] = setting(())  # further tokens that end a row in decoding

    model_types: ClassVar[tuple[str, ...]] = ("t5", "mt5")

    def module(self, **options: Any) -> Any:
        """See `Backbone`."""
        from pipejax.model.t5 import T5

        return T5(self, **options)

    def head_width(self) -> int:
        """See `Backbone`. 0 for a modified T5; a subclass overrides the method if it supports attention in blocks."""
        from pipejax.model.t5 import is_unpatched

        return self.d_kv if is_unpatched(self.module()) else 0

    def tensors(self) -> dict[str, tuple[str, str]]:
        """See `Backbone`."""
        table = {"shared/embedding": (SHARED[0], "VD")}
        for stack, depth in (("encoder", self.num_layers), ("decoder", self.num_decoder_layers)):
            table |= self.biases(stack, depth)
            for block in range(depth):
                for layer, (ours, theirs) in enumerate(LAYERS[stack].items()):
                    dense = RELU if self.feed_forward == "relu" else GATED
                    for path, name, axes in dense if ours == "feed_forward" else ATTENTION:
                        name = f"{stack}.block.{block}.layer.{layer}.{name.format(theirs)}.weight"
                        table[f"{stack}/layers_{block}/{ours}/{path}"] = (name, axes)
            table[f"{stack}/norm/scale"] = (f"{stack}.final_layer_norm.weight", "D")
        return table if self.tied_head else table | {"lm_head/kernel": (HEAD, "DV")}

    def biases(self, stack: str, depth: int) -> dict[str, tuple[str, str]]:
        """Returns the entries of `tensors` for the relative bias of a stack.

        Args:
          stack: "encoder" or "decoder".
          depth: the number of its layers.
        """
        name = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        return {f"{stack}/relative_bias/embedding": (name, "BH")}

    def sizes(self) -> dict[str, tuple[str, int]]:
        """See `Backbone`."""
        keys = {"V": "vocab_size", "D": "d_model", "F": "d_ff", "H": "num_heads", "B": "relative_attention_num_buckets"}
        sizes = {letter: (key, int(getattr(self, key))) for letter, key in keys.items()}
        return sizes | {"I": ("num_heads * d_kv", self.num_heads * self.d_kv)}

    def training_flops(self, lengths: "np.ndarray") -> float:
        """See `Backbone`. The floating-point operations of the forward pass, and twice as many of the backward pass.

        A multiply-add counts as two operations. Only real tokens count: neither padding nor the second computation of
        rematerialised values is included (as in "model FLOPs utilisation", Chowdhery et al. 2022).

        Args:
          lengths: [B, 2], the source tokens and target slots of each example.
        """
        sources, slots = lengths.astype(float).T
        inner, width = self.num_heads * self.d_kv, self.d_model
        feed_forward = width * self.d_ff * (2 if self.feed_forward == "relu" else 3)
        encoder = 2 * (4 * width * inner + feed_forward) * sources + 4 * inner * sources**2
        memory = 2 * 2 * width * inner * sources
        decoder = 2 * (6 * width * inner + feed_forward) * slots + 4 * inner * slots * (slots + sources)
        head = 2 * width * self.vocab_size * slots
        forward = self.num_layers * encoder + self.num_decoder_layers * (memory + decoder) + head
        return float(3 * forward.sum())

    def like_t5(self) -> "T5Config":
        """See `Backbone`."""
        return self

    def check(self, where: str) -> None:
        """See `Backbone`."""
        if self.relative_attention_max_distance <= self.relative_attention_num_buckets // 2:
            raise UserError(
                f"{where}: model.relative_attention_max_distance",
                found=f"{self.relative_attention_max_distance}",
                expected=f"more than half of the {self.relative_attention_num_buckets} buckets",
            )

    @classmethod
    def read_facts(cls, facts: Mapping[str, object]) -> dict[str, object]:
        """See `Backbone`. Whether the head is tied is determined from the weights (`fitted`)."""
        own = {field.name for field in dataclasses.fields(cls)} - {field.name for field in dataclasses.fields(T5Config)}
        given = read_keys(facts, cls.keys_of(facts.get("model_type")))
        names = {field.name for field in dataclasses.fields(T5Config)} & given.keys()
        values = {key: given[key] for key in names} | {key: facts[key] for key in own & facts.keys()}
        if values["num_decoder_layers"] is None:
            values["num_decoder_layers"] = given["num_layers"]
        if given["num_hidden_layers"] is not None:
            values["num_layers"] = given["num_hidden_layers"]
        return values | {"feed_forward": _feed_forward(given), "scale_head": cls.scales_head(given)}

    @classmethod
    def keys_of(cls, model_type: object) -> Keys:
        """Returns the table of the keys to read from a config.json with this model_type."""
        return MT5_KEYS if model_type == "mt5" else KEYS

    @classmethod
    def scales_head(cls, given: JsonMapping) -> bool:
        """Returns whether the inputs of the head are scaled, given the values of config.json. mT5 never scales them.

        transformers 5 reads the key scale_decoder_outputs. Older versions scale if the head is tied, as in v1.0, and do
        not scale otherwise, as in v1.1.
        """
        scaled: bool | None = given["scale_decoder_outputs"]
        return given["model_type"] != "mt5" and (given["tie_word_embeddings"] if scaled is None else scaled)

    def facts(self) -> dict[str, object]:
        """See `Backbone`. An mT5 is written as a t5 without scaling, as only t5 has scale_decoder_outputs."""
        facts = dataclasses.asdict(self)
        kind, tied, scaled = (facts.pop(key) for key in ("feed_forward", "tied_head", "scale_head"))
        del facts["other_eos_token_ids"]
        return facts | {
            "eos_token_id": self.eos_fact,
            "architectures": ["T5ForConditionalGeneration"],
            "model_type": self.model_types[0],
            "is_encoder_decoder": True,
            "feed_forward_proj": kind,
            "dense_act_fn": FEED_FORWARDS[kind],
            "is_gated_act": kind != "relu",
            "tie_word_embeddings": tied,
            "scale_decoder_outputs": scaled,
        }

    def fitted(self, tensors: MutableMapping[str, Any], weights: Path) -> Self:
        """See `Backbone`. Determines from the weights whether the head is tied, as config.json may be wrong.

        The head is `lm_head.weight` if the file has this tensor, and otherwise the embedding table.
        """
        import numpy as np

        from pipejax.system.cli import note

        if tensors.pop(UNUSED, None):
            note(f"{weights}: dropped {UNUSED}, which T5 does not use")
        present = [name for name in SHARED if name in tensors]
        for name in present[1:]:
            alias = tensors.pop(name)
            if not np.array_equal(alias.read(), tensors[present[0]].read()):
                raise UserError(
                    f"{alias.file}: {name}",
                    found=f"a table that differs from {present[0]}",
                    expected="the embedding table that the encoder and the decoder share",
                )
        if present:
            tensors[SHARED[0]] = tensors.pop(present[0])
        head, _ = dataclasses.replace(self, tied_head=False).tensors().get("lm_head/kernel", (HEAD, ""))
        model = self.with_head(tied=head not in tensors)
        if model.tied_head and not model.scale_head:
            note(f"{weights}: no {head}; the head is the shared table, without scaling, as in transformers")
        return model

    def with_head(self, *, tied: bool) -> Self:
        """Returns the config adapted to the weights, which show whether the head is the embedding table."""
        return dataclasses.replace(self, tied_head=tied)

    def without_copies(self, params: "MutableMapping[str, np.ndarray]") -> Self:
        """See `Backbone`. A head that is a copy of the table counts as tied, as in transformers."""
        import numpy as np

        if self.tied_head or not np.array_equal(params["lm_head/kernel"].T, params["shared/embedding"]):
            return self
        del params["lm_head/kernel"]
        return self.with_head(tied=True)

    def check_names(self, names: frozenset[str], where: Path, weights: Path) -> None:
        """See `Backbone`."""
        dense = min((name for name in names if ".DenseReluDense.wi" in name), default=None)
        if dense and (".wi." in dense) != (self.feed_forward == "relu"):
            expected = "relu" if ".wi." in dense else "gated-gelu"
            raise UserError(
                f"{where}: feed_forward_proj",
                found=f"{self.feed_forward}",
                expected=f"{expected}, since {weights.name} has {dense}",
            )
        own = [name for name, _ in self.tensors().values()]  # a subclass may have other names
        for stack, key in (("encoder", "num_layers"), ("decoder", "num_decoder_layers")):
            there, here = ({x.split(".")[2] for x in each if x.startswith(f"{stack}.block.")} for each in (names, own))
            if len(there) != len(here):
                raise UserError(
                    f"{where}: {key}",
                    found=f"{getattr(self, key)}",
                    expected=f"{len(there)}, the number of {stack} blocks in {weights.name}",
                )


def _feed_forward(given: JsonMapping) -> str:
    """Returns the value of `feed_forward` that the values of config.json describe.

    Raises:
      UserError: the values contradict each other.
    """
    name: str = given["feed_forward_proj"]
    function = FEED_FORWARDS.get(name, name.split("-")[-1])
    named = {"dense_act_fn": function, "is_gated_act": name.split("-")[0] == "gated"}
    found = {key: value if given[key] is None else given[key] for key, value in named.items()}
    known: dict[tuple[object, object], str] = {(act, gate != "relu"): gate for gate, act in FEED_FORWARDS.items()}
    if (described := known.get((found["dense_act_fn"], found["is_gated_act"]))) is not None:
        return described
    for key, expected in named.items():
        if name in FEED_FORWARDS and found[key] != expected:
            raise UserError(key, found=f"{found[key]!r}", expected=f"{expected!r}, since feed_forward_proj is {name}")
    return name


# Published sizes (Raffel et al. 2020; T5 v1.1; Xue et al. 2021), for plans and measurements without their weights.
_BASE = T5Config(vocab_size=32128, d_model=768, d_kv=64, d_ff=3072, num_heads=12, num_layers=12, num_decoder_layers=12)
_SMALL = dataclasses.replace(_BASE, d_model=512, d_ff=2048, num_heads=8, num_layers=6, num_decoder_layers=6)
_LARGE = dataclasses.replace(_BASE, d_model=1024, d_ff=4096, num_heads=16, num_layers=24, num_decoder_layers=24)
_V1_1: JsonObject = {"feed_forward": "gated-gelu", "tied_head": False, "scale_head": False}
_MADLAD: JsonObject = {**_V1_1, "pad_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 0}

ARCHITECTURES = {
    "small": _SMALL,
    "base": _BASE,
    "large": _LARGE,
    "3b": dataclasses.replace(_LARGE, d_kv=128, d_ff=16384, num_heads=32),
    "11b": dataclasses.replace(_LARGE, d_kv=128, d_ff=65536, num_heads=128),
    "v1_1-small": dataclasses.replace(_SMALL, d_ff=1024, num_heads=6, num_layers=8, num_decoder_layers=8, **_V1_1),
    "v1_1-base": dataclasses.replace(_BASE, d_ff=2048, **_V1_1),
    "v1_1-large": dataclasses.replace(_LARGE, d_ff=2816, **_V1_1),
    "v1_1-xl": dataclasses.replace(_LARGE, d_model=2048, d_ff=5120, num_heads=32, **_V1_1),
    "v1_1-xxl": dataclasses.replace(_LARGE, d_model=4096, d_ff=10240, num_heads=64, **_V1_1),
    "madlad-3b": T5Config(256_000, 1024, 128, 8192, 16, 32, 32, **_MADLAD),
    "madlad-7b": T5Config(256_000, 2048, 128, 8192, 16, 48, 48, **_MADLAD),
    "madlad-10b": T5Config(256_000, 2048, 256, 16384, 16, 32, 32, **_MADLAD),
}
_OF_V1_1 = {name.replace("v1_1", "mt5"): size for name, size in ARCHITECTURES.items() if "v1_1" in name}
ARCHITECTURES |= {name: dataclasses.replace(size, vocab_size=250_112) for name, size in _OF_V1_1.items()}


def architecture(name: str) -> Backbone:
    """Returns the backbone with a published size, such as "base" or "v1_1-large"; Flan-T5 has the sizes of v1.1.

    Raises:
      UserError: there is no size with this name.
    """
    if name in ARCHITECTURES:
        return ARCHITECTURES[name]
    known: dict[str, Backbone] = {}
    for module in dict.fromkeys(place.partition(":")[0] for place in registry.BACKBONES.values()):
        known |= registry.find(module).ARCHITECTURES
    if name not in known:
        hint = did_you_mean(name, known)
        raise UserError(
            "model", found=f"{name!r}", expected=f"one of {', '.join(known)} (Flan-T5 has v1_1's sizes)", hint=hint
        )
    return known[name]
