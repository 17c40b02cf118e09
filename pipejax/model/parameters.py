"""The parameters of a T5: our path of each, Hugging Face's name for it, and the shape that follows from the config.

Kernels are [in, out] here and [out, in] there. Axes: V vocabulary, D width, F feed-forward width, H heads, I inner
width of all heads, B buckets.
"""

from collections.abc import Mapping, Sequence

from pipejax.config import T5Config
from pipejax.model import lora, quantization
from pipejax.system.errors import UserError

# Our path, Hugging Face's name without ".weight", our axes; `mapping` prefixes the layer.
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


def mapping(model: T5Config) -> dict[str, tuple[str, str]]:
    """Our path of each parameter -> (Hugging Face's name, our axes)."""
    table = {"shared/embedding": (SHARED[0], "VD")}
    for stack, depth in (("encoder", model.num_layers), ("decoder", model.num_decoder_layers)):
        bias = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        table[f"{stack}/relative_bias/embedding"] = (bias, "BH")
        for block in range(depth):
            for layer, (ours, theirs) in enumerate(LAYERS[stack].items()):
                dense = RELU if model.feed_forward == "relu" else GATED
                for path, name, axes in dense if ours == "feed_forward" else ATTENTION:
                    name = f"{stack}.block.{block}.layer.{layer}.{name.format(theirs)}.weight"
                    table[f"{stack}/layers_{block}/{ours}/{path}"] = (name, axes)
        table[f"{stack}/norm/scale"] = (f"{stack}.final_layer_norm.weight", "D")
    return table if model.tied_head else table | {"lm_head/kernel": ("lm_head.weight", "DV")}


def check_paths(where: str, shapes: Mapping[str, Sequence[int]], model: T5Config) -> None:
    """Low-rank factors may lie beside their kernels, and scales beside int8 matrices.

    Raises:
      UserError: a parameter is missing, one is too many, or one has another shape than the config implies; `where` says
        whose, and the line which.
    """
    table = mapping(model)
    factors = {path for path in shapes if lora.is_factor(path)}
    scales = {quantization.scale_path(path): axes for path, (_, axes) in table.items()}
    for path in sorted(table.keys() - shapes.keys()):
        raise UserError(f"{where}: {path}: missing; expected {len(table)} parameters, as the config implies")
    for path, shape in sorted(shapes.items()):
        kernel = path.rpartition("/")[0] + "/kernel"
        if path in factors and lora.ADAPTED.fullmatch(kernel) and kernel in table:
            inputs, outputs = shapes[kernel]
            rank = shape[-1 if path.endswith(lora.A) else 0] if len(shape) == 2 else 0
            expected = [inputs, rank] if path.endswith(lora.A) else [rank, outputs]
            other = path[:-1] + ("b" if path.endswith(lora.A) else "a")
            if list(shape) != expected or rank not in shapes.get(other, ()):
                raise UserError(f"{where}: {path}: found shape {list(shape)}; expected one of a pair of factors")
        elif path in scales:  # one of each output: a table's rows, a kernel's columns
            axes = scales[path]
            check_shape(f"{where}: {path}", tuple(shape), axes[0] if axes == "VD" else axes[1], model)
        elif path not in table:
            raise UserError(f"{where}: {path}: found one too many; expected the {len(table)} that the config implies")
        else:
            check_shape(f"{where}: {path}", tuple(shape), table[path][1], model)


def check_shape(where: str, shape: tuple[int, ...], axes: str, model: T5Config) -> None:
    """Raises a UserError that begins with `where` if the config implies another shape.

    Args:
      where: begins the message.
      shape: that was found.
      axes: a letter of each axis that the config implies, such as "VD".
      model: the config.
    """
    keys = {
        "V": "vocab_size",
        "D": "d_model",
        "F": "d_ff",
        "H": "num_heads",
        "I": "num_heads * d_kv",
        "B": "relative_attention_num_buckets",
    }
    sizes = {key: getattr(model, key, model.num_heads * model.d_kv) for key in (keys[axis] for axis in axes)}
    expected = list(sizes.values())
    if list(shape) != expected:
        named = ", ".join(f"{key} {size}" for key, size in sizes.items())
        raise UserError(f"{where}: found shape {list(shape)}; expected {expected}, as the config has {named}")
