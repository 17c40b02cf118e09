"""Converts checkpoints from Hugging Face format to pipejax and back, without torch.

Both directions are strict: a tensor that is unused or missing, or whose shape contradicts config.json, is an error. The
backbone defines the names and shapes of its tensors and the keys of its config.json (`pipejax.model.backbone`).
"""

import dataclasses
import json
import re
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from pipejax.checkpoint import Restored, check_beside, check_place, open_run, require_free, save_params
from pipejax.checkpoint.fingerprint import digest, fingerprints
from pipejax.checkpoint.student import report_own_encoder
from pipejax.config import Config, DataConfig, T5Config, TrainConfig, check, find_class
from pipejax.convert import description, generation, peft_adapters
from pipejax.convert.tensor_files import check_finite, find_quantization, open_tensors, read_json
from pipejax.convert.tensor_names import check_names, names_of_decoder, unwrapped
from pipejax.data import hub
from pipejax.data.tokenizer import Tokenizer, check_special_ids, warn_of_start
from pipejax.model.auxiliary import ITEM
from pipejax.model.backbone import Backbone
from pipejax.model.parameters import check_shape
from pipejax.registry import BACKBONES
from pipejax.system import Tree
from pipejax.system.cli import note
from pipejax.system.errors import UserError, first_line
from pipejax.system.files import VOCABULARY, absolute, look, new_directory, read_small, require_own
from pipejax.system.strict_json import JsonMapping, JsonObject

Params = JsonObject  # nested; the leaves are float32 arrays
Model = TypeVar("Model", bound=Backbone)

TOKENIZER_FILES = (
    "spiece.model",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    *("vocab.json", "merges.txt", "vocab.txt", "tokenizer.model", "sentencepiece.bpe.model"),
)
SENTINEL = re.compile(r"<extra_id_\d+>")  # an added token of T5's tokenizers
# Files of a model to download, if they exist.
OF_HUB = ("*.json", *TOKENIZER_FILES, "model*.safetensors", "adapter_model.*", "auxiliary.safetensors")
AUXILIARY = "auxiliary.safetensors"  # auxiliary parameters; its metadata have the `params_fp` of the model


def read_hf(directory: str | Path, backbone: type[Backbone] | None = None) -> tuple[Backbone, Params]:
    """Reads a Hugging Face directory into a backbone and float32 parameters.

    Args:
      directory: the directory.
      backbone: the class of the architecture; None: determined by "model_type" in config.json.

    Raises:
      UserError: config.json, the tokenizer or the weights are invalid or contradict each other.
    """
    directory = Path(directory)
    model, _ = _read_architecture(directory, backbone)
    return _read_params(directory, model)


def _read_params(directory: Path, model: Model) -> tuple[Model, Params]:
    """Reads the weights of a directory into float32 parameters, checking names and shapes."""
    quantization = find_quantization(directory)
    try:
        found = _read_floats(directory, model)
    except UserError as error:
        if quantization:
            advice = "load the model in transformers, call its dequantize(), and save it with save_pretrained"
            raise UserError(problem=f"{error}; {quantization}: quantised weights are not read", hint=advice) from error
        raise
    if quantization:
        note(f"{directory}: {quantization}: ignored, because the weights are not quantised")
    return found


def _read_floats(directory: Path, model: Model) -> tuple[Model, Params]:
    """Reads float weights, after checking the names and shapes of all tensors."""
    weights, tensors = open_tensors(directory)
    tensors = unwrapped(model, weights, tensors)
    model = model.fitted(tensors, weights)
    check_names(directory / "config.json", model, weights, tensors)
    table = model.tensors()
    for path, (name, axes) in table.items():  # all shapes are checked before the first tensor is read
        axes = axes[::-1] if path.endswith("kernel") else axes
        check_shape(f"{tensors[name].file}: {name}", tensors[name].shape, axes, model)
    flat = {}
    for path, (name, _) in table.items():
        array = tensors.pop(name).read()  # removed from the dict, so that no tensor is in memory twice
        flat[path] = np.array(array.T if path.endswith("kernel") else array, dtype=np.float32, order="C")
    model = model.without_copies(flat)
    return model, unflatten_dict(flat, sep="/")


def write_hf(
    config: Backbone,
    params: Params,
    out: str | Path,
    tokenizer_dir: str | Path | None,
    *,
    run: Config | None = None,
    origin: description.ModelOrigin = description.UNKNOWN,
    auxiliary: Tree = None,
) -> None:
    """Writes a directory that transformers loads, completely or not at all.

    Args:
      config: the architecture.
      params: the parameters.
      out: the directory, absent or empty.
      tokenizer_dir: the tokenizer's files to copy; None: none.
      run: the config whose settings are kept in pipejax.json and described in README.md; None: neither file is written.
      origin: facts for README.md.
      auxiliary: the auxiliary parameters of the run; None: it has none. They are written to AUXILIARY.

    Raises:
      UserError: the directory is not empty or cannot be written, or a parameter is not finite.
    """
    beside = None if auxiliary is None else (flatten_dict(auxiliary, sep="/"), digest(fingerprints(params)))
    generate = generation.of_run(run) if run else generation.of_model(config)
    flat = flatten_dict(params, sep="/")
    config = config.written(flat)
    files = {"config.json": _config_facts(config), generation.FILE: generate}
    tensors = _to_tensors(config, flat)
    _write_directory(out, files, description.WEIGHTS, tensors, tokenizer_dir, run=run, origin=origin, auxiliary=beside)


def _config_facts(model: Backbone) -> dict[str, object]:
    """Returns the content of config.json.

    Raises:
      UserError: the backbone has no model type that is different from the types of transformers.
    """
    kind, facts = type(model), model.facts()
    name = facts.get("model_type")
    is_own = kind is T5Config or any("model_types" in vars(x) for x in kind.__mro__ if not issubclass(T5Config, x))
    if not is_own or name not in kind.model_types:
        raise UserError(
            f"model: {kind.__name__}.model_types",
            found=f"{kind.model_types}, and {name!r} for config.json",
            expected="a new name, first in the list, since transformers loads a known name as its own model",
        )
    return facts


def _write_directory(
    out: str | Path,
    files: Mapping[str, Mapping[str, object]],
    weights: str,
    tensors: dict[str, np.ndarray],
    tokenizer_dir: str | Path | None,
    *,
    run: Config | None,
    origin: description.ModelOrigin,
    auxiliary: tuple[Mapping[str, np.ndarray], str] | None = None,
) -> None:
    """Writes the files of a model directory, the tokenizer and the weights, completely or not at all.

    Args:
      out: the directory, absent or empty.
      files: contents of JSON files, by name.
      weights: the name of the file of tensors.
      tensors: by name.
      tokenizer_dir: the tokenizer's files to copy; None: none.
      run: the config for pipejax.json and README.md; None: neither is written.
      origin: facts for README.md.
      auxiliary: the auxiliary parameters by path, and the `params_fp` of the model; None: there are none.
    """
    out = absolute(out)
    require_free(out)
    try:
        with new_directory(out) as staging:
            for name, values in files.items():
                (staging / name).write_text(json.dumps(values, indent=2, sort_keys=True) + "\n")
            save_file(tensors, staging / weights, metadata={"format": "pt"})  # transformers requires this
            if auxiliary is not None:
                own, fingerprint = auxiliary
                arrays = {path: np.asarray(x) for path, x in own.items()}
                save_file(arrays, staging / AUXILIARY, metadata={"format": "pt", "params_fp": fingerprint})
            for name in (weights, *([AUXILIARY] if auxiliary else [])):  # safetensors sets the mode 0600
                shutil.copymode(staging / next(iter(files)), staging / name)
            if tokenizer_dir is not None:
                _copy_tokenizer(Path(tokenizer_dir), staging)
            if run:
                tokenizer = None if tokenizer_dir is None else Tokenizer.load(tokenizer_dir)
                for line in description.write_files(staging, out.name, run, tokenizer=tokenizer, origin=origin):
                    note(f"{out.name}: {line}")
        if "use_cache" in files.get(generation.FILE, {}):
            note(
                f"{out.name}/{generation.FILE}: has use_cache = false, because the cache of "
                "transformers is too small for this decoder"
            )
    except (OSError, SafetensorError) as error:
        raise UserError(out, f"cannot be written ({first_line(error)})") from error


def from_hf(
    source: str | Path, out: str | Path, backbone: type[Backbone] | None = None, *, base_model: str = ""
) -> str:
    """Converts a Hugging Face directory, or a hub model NAME or NAME@REVISION, to a run with step 0.

    For a PEFT adapter, the run has the weights of its base and the factors. The tokenizer and the settings come from
    the adapter's directory if it has them, else from the base.

    Args:
      source: the directory or hub id.
      out: the run directory to write.
      backbone: the class of the architecture; None: determined by "model_type".
      base_model: the base of an adapter; "": the one named in its adapter_config.json.

    Returns:
      The model's size in words.
    """
    require_free(Path(out))
    check_place(Path(out))
    given = directory = locate(str(source))
    if is_adapter := peft_adapters.is_adapter(given):
        base_model = base_model or peft_adapters.base_of(given)
        note(f"{given}: a LoRA adapter, which is saved with the weights of {base_model}")
        directory = locate(base_model)
    elif base_model:
        raise UserError(
            given,
            found=f"no {peft_adapters.CONFIG}, so this is not a LoRA adapter",
            expected="an adapter, because --base-model is given",
        )
    model, files = _read_architecture(directory, backbone)
    with tempfile.TemporaryDirectory() as scratch:
        own = given if _copy_tokenizer(given, Path(scratch) / "tokenizer") else directory
        tokenizer = _copy_tokenizer(own, Path(scratch) / "tokenizer")
        if tokenizer is None:
            note(f"{directory}: no tokenizer files, so the checkpoint carries no tokenizer")
        else:
            _check_vocabulary(_fitting_tokenizer(tokenizer, model, own), model, own, files)
        factors = peft_adapters.read_factors(given, model) if is_adapter else {}
        model, params = _read_params(directory, model)
        params = unflatten_dict(flatten_dict(params, sep="/") | factors, sep="/")
        name = absolute(source if look(source) else str(source).partition("@")[0]).name
        config = dataclasses.replace(_run_settings(directory, model, given), name=name)
        try:
            auxiliary = None if config.auxiliary is None else _read_auxiliary(given / AUXILIARY, params)
            save_params(out, config, params, tokenizer_source=tokenizer, auxiliary=auxiliary)
        except (OSError, ValueError) as error:  # TensorStore raises ValueError, also for a full disk
            raise UserError(out, f"cannot be written ({first_line(error)})") from error
    return _size_in_words(params)


def _read_auxiliary(file: Path, params: Params) -> Params:
    """Reads the auxiliary parameters that `to_hf` wrote beside a model.

    Raises:
      UserError: the file is missing, or the parameters were trained for other weights.
    """
    if look(file) != "file":
        raise UserError(file, "no such file", expected=f"the auxiliary parameters that {description.FILE} describes")
    require_own(file)
    try:
        with safe_open(file, framework="numpy") as opened:
            found = {path: opened.get_tensor(path) for path in opened.keys()}  # noqa: SIM118  # it has no iterator
            trained = (opened.metadata() or {}).get("params_fp", "")
    except (OSError, SafetensorError) as error:
        raise UserError(file, f"cannot be read ({first_line(error)})") from error
    check_beside(str(file), trained, digest(fingerprints(params)))
    nested: Params = unflatten_dict(found, sep="/")
    return nested


def to_hf(
    checkpoint: str | Path,
    out: str | Path,
    best: bool = False,
    base_model: str = "",
    scores: str | Path = "",
    adapter: bool = False,
    license: str = "",
) -> str:
    """Converts a run to a Hugging Face directory; returns the size in words.

    Args:
      checkpoint: the run directory.
      out: the directory to write.
      best: convert the step of the best evaluation instead of the newest one.
      base_model: the hub name of the model that training started from.
      scores: a file of `pipejax evaluate --json` for README.md.
      adapter: write only the low-rank factors, as a PEFT adapter.
      license: the license for README.md.
    """
    require_free(Path(out))
    if adapter and not base_model:
        raise UserError("--adapter", found="no --base-model", expected="the name or the directory of the adapted model")
    restored = open_run(checkpoint, best=best, apart=adapter)
    report_own_encoder(checkpoint)
    origin = description.ModelOrigin(base_model, _scores_of(restored, Path(scores)) if scores else None, license)
    assert restored.config.model is not None  # `open_run` checks this
    model, params, files = restored.config.model, restored.items["params"], restored.tokenizer_files()
    if files is not None:
        check_special_ids(Tokenizer.load(files), model, f"{checkpoint}: model.eos_token_id", str(files))
    if adapter:
        params, facts = peft_adapters.to_peft(model, params, base_model)
        _check_base(flatten_dict(restored.items["params"], sep="/"), base_model, type(model))
        _write_directory(
            out, {peft_adapters.CONFIG: facts}, peft_adapters.WEIGHTS, params, files, run=restored.config, origin=origin
        )
    else:
        if narrow := {dtype for dtype, *_ in restored.arrays["params"].values()} - {"float32"}:
            note(f"{checkpoint}: its weights are {' and '.join(sorted(narrow))}; they are written in float32")
        write_hf(model, params, out, files, run=restored.config, origin=origin, auxiliary=restored.items.get(ITEM))
    return _size_in_words(params)


def _check_base(params: Mapping[str, np.ndarray], base_model: str, backbone: type[Backbone]) -> None:
    """Raises a UserError unless the run's weights equal the base's, because the factors fit only the base's weights.

    If the base is not a local directory, its weights are not compared, and a note says so.
    """
    if look(base_model) != "directory":
        note(f"{base_model}: not compared with the weights of the run, because it is not a directory")
        return
    for path, array in flatten_dict(read_hf(base_model, backbone)[1], sep="/").items():
        if not np.array_equal(array, params.get(path, ())):
            raise UserError(
                f"{base_model}: {path}",
                found="weights that differ from the weights of the run",
                expected="the model that the run adapted",
            )


def _scores_of(restored: Restored, file: Path) -> JsonObject:
    """Returns the output of `pipejax evaluate --json` in a file.

    Raises:
      UserError: the file is about other weights.
    """
    found, own = read_json(file.resolve()), digest(restored.arrays["params"])
    if found.get("params_fp") != own:
        raise UserError(
            f"{file}: params_fp",
            found=f"{found.get('params_fp')!r}",
            expected=f"{own!r}, the params_fp of {restored.path}: the output of `pipejax evaluate "
            "--json` for these weights",
        )
    return found


def _run_settings(directory: Path, model: Backbone, adapter: Path | None = None) -> Config:
    """Returns the config of a converted model.

    The settings come from pipejax.json in the directory of the adapter or of the model. Without this file they follow
    the settings of transformers' `generate`.
    """
    generate = generation.read_generation(directory, read_json(directory / "config.json"))
    read = (
        description.read_settings(place, model, generate) for place in dict.fromkeys((adapter or directory, directory))
    )
    if (found := next(filter(None, read), None)) is not None:
        config, lines = found
    else:
        decode, lines = generation.decoding(generate, model)
        config = Config(
            model=model,
            data=DataConfig(task="none", separator=" "),  # no task defines a separator here; one space joins the rows
            train=TrainConfig(method="none"),
            decode=decode,
        )
    for line in lines:
        note(line)
    return config


def _fitting_tokenizer(copied: Path, model: Backbone, own: Path) -> Tokenizer:
    """Returns the tokenizer in `copied`; removes sentinels for which the model has no embeddings from its files.

    T5's tokenizer class adds 100 sentinels unless the files set another number, even for MADLAD, which has none.

    Args:
      copied: the directory of the copied tokenizer files.
      model: the architecture.
      own: the directory that the files were copied from, for messages.
    """
    tokenizer, most = Tokenizer.load(copied, copy_of=own), model.vocab_size
    if tokenizer.size <= most:
        return tokenizer
    within, beyond = (
        [bool(SENTINEL.fullmatch(tokenizer.piece(i))) for i in ids]
        for ids in (range(most), range(most, tokenizer.size))
    )
    if any(within) or not all(beyond):
        return tokenizer
    for name in ("tokenizer_config.json", *(x for x in TOKENIZER_FILES if x.endswith(".json") and look(copied / x))):
        if name != "vocab.json":
            facts = _without_sentinels(read_json(copied / name) if look(copied / name) else {})
            facts |= {"extra_ids": 0} if name == "tokenizer_config.json" else {}
            (copied / name).write_text(json.dumps(facts, ensure_ascii=False), encoding="utf-8")
    note(f"{own}: its tokenizer has {len(beyond)} sentinels beyond the vocabulary of {most}, which are left out")
    return Tokenizer.load(copied, copy_of=own)


def _without_sentinels(facts: JsonMapping) -> JsonObject:
    """Returns the content of a tokenizer's file without the sentinels among its pieces and added tokens."""

    def is_kept(token: object) -> bool:
        piece = token.get("content") if isinstance(token, dict) else token[0] if isinstance(token, list) else token
        return not SENTINEL.fullmatch(str(piece))

    kept = dict(facts)
    # The vocabulary of a Unigram model is a list of [piece, score].
    if isinstance(model := facts.get("model"), dict) and isinstance(model.get("vocab"), list):
        kept["model"] = model | {"vocab": [pair for pair in model["vocab"] if is_kept(pair)]}
    for key in ("added_tokens", "additional_special_tokens", "extra_special_tokens"):
        if isinstance(facts.get(key), list):
            kept[key] = [token for token in facts[key] if is_kept(token)]
    if isinstance(decoder := facts.get("added_tokens_decoder"), dict):
        kept["added_tokens_decoder"] = {i: token for i, token in decoder.items() if is_kept(token)}
    return {key: value for key, value in kept.items() if not SENTINEL.fullmatch(key)}  # the form of added_tokens.json


def _check_vocabulary(tokenizer: Tokenizer, model: Backbone, directory: Path, files: dict[str, Path]) -> None:
    """Compares the tokenizer with the model; `files` maps special ids to the files that set them."""
    size, most = tokenizer.size, model.vocab_size
    if size > most:
        raise UserError(
            directory, found=f"a tokenizer of {size} ids", expected=f"at most {most}, config.json's vocab_size"
        )
    name = f"the tokenizer of {directory}"
    check_special_ids(tokenizer, model, f"{files['eos_token_id']}: eos_token_id", name)
    warn_of_start(tokenizer, model, f"{files['decoder_start_token_id']}: decoder_start_token_id", name)
    if tokenizer.keeps_ends:
        note(
            f"{directory}: truncation_side: found left; ignored, because sources are truncated at "
            "the end (data.max_source)"
        )
    if size < most * 0.9:
        note(f"{directory}: a tokenizer of {size} ids for a vocabulary of {most}; the other ids have no text")


def _read_architecture(directory: Path, backbone: type[Backbone] | None) -> tuple[Backbone, dict[str, Path]]:
    """Reads config.json and generation_config.json into a backbone, with the files that set the special ids."""
    file = directory / "config.json"
    if (directory / "checkpoints").is_dir():
        raise UserError(directory, found="a checkpoint of pipejax", expected="a Hugging Face model")
    if not look(file):
        below = [path.parent.name for path in sorted(directory.glob("*/config.json"))]
        found = f"no config.json, but one in its {below[-1]}" if below else "no config.json"
        found = "a LoRA adapter, which has no base weights" if peft_adapters.is_adapter(directory) else found
        raise UserError(directory, found=found, expected="a directory that transformers saved with a T5")
    facts = read_json(file)
    kind = facts.get("model_type")
    if kind is not None and kind not in (known := backbone.model_types if backbone else (*BACKBONES,)):
        raise UserError(f"{file}: model_type", found=f"{kind!r}", expected=" or ".join(known))
    backbone = backbone or find_class(BACKBONES.get(str(kind), BACKBONES["t5"]), "model")
    try:
        values = backbone.read_facts(facts)
    except UserError as error:
        raise error.within(file) from error
    ids, lines = generation.special_ids(generation.read_generation(directory, facts), facts | values)
    for line in lines:
        note(line)
    values |= {key: value for key, (value, _) in ids.items()}
    for key in (key for key in generation.IDS if key in values and values[key] is None):
        del values[key]
        if key == "eos_token_id":
            note(f"{file}: eos_token_id: found null; rows end with {backbone.eos_token_id}, the backbone's default")
    files = dict.fromkeys(generation.IDS, file) | {key: place for key, (_, place) in ids.items()}
    if "eos_token_id" in values:
        where = f"{files['eos_token_id']}: eos_token_id"
        eos, *others = generation.several(values["eos_token_id"], where)
        if others and "other_eos_token_ids" not in getattr(backbone, "__dataclass_fields__", {}):
            raise UserError(
                where,
                found=f"{[eos, *others]}",
                expected=f"a single id, since {backbone.__name__} has no field other_eos_token_ids: tuple[int, ...]",
            )
        values |= {"eos_token_id": eos} | ({"other_eos_token_ids": (*others,)} if others else {})
    if "decoder_start_token_id" not in values:
        values["decoder_start_token_id"] = values.get("pad_token_id", 0)
        note(f"{file}: lacks decoder_start_token_id; rows begin with pad_token_id, as in every T5 by Google")
    model = backbone(**values)
    try:
        check(Config(model=model), where="")
    except UserError as error:
        problem = str(error).replace("model.", "").replace("feed_forward:", "feed_forward_proj:")
        problem = problem.replace("other_eos_token_ids:", "eos_token_id:")
        problem = problem.replace("scale_head:", "scale_decoder_outputs or tie_word_embeddings:")
        raise UserError(f"{files.get(problem.split(': ')[1], file)}{problem}") from error
    return model, files


def _to_tensors(model: Backbone, flat: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Converts parameters, by path, to the names and the layout of transformers' torch tensors."""
    names_of_decoder(model)
    table = model.tensors()
    for path in sorted(flat.keys() ^ table.keys()):
        problem = "missing" if path in table else "not in the config"
        raise UserError(f"parameters: {path}", problem, expected=f"the {len(table)} parameters that the config implies")
    tensors = {}
    for path, (name, axes) in table.items():
        array = np.asarray(flat[path], dtype=np.float32)
        check_shape(f"parameters: {path}", array.shape, axes, model)
        check_finite(f"parameters: {path}", array)
        tensors[name] = np.ascontiguousarray(array.T if path.endswith("kernel") else array)
    return tensors


def locate(source: str, *, at_once: bool = False) -> Path:
    """Returns the source if it is a directory; else downloads the hub model and returns its directory.

    With `at_once`, the hub is not contacted: the files are those already downloaded, of the newest known version.

    Raises:
      UserError: the source is neither a directory nor a reachable hub id.
    """
    if (found := look(source)) == "directory":
        return Path(source)
    if found:
        raise UserError(source, found="a file", expected="a directory with config.json and weights")
    reason = "no such path"
    if of_hub := hub.split_revision(source):
        name, at = of_hub
        try:
            from huggingface_hub import snapshot_download

            directory = Path(snapshot_download(name, allow_patterns=[*OF_HUB], local_files_only=at_once, **at))
            for other in () if at_once else ("pytorch_model*.bin*", "flax_model.msgpack"):
                names = "adapter_model.*", "model*.safetensors", "pytorch_model*.bin"
                if not any(found for weights in names for found in directory.glob(weights)):
                    snapshot_download(name, allow_patterns=other, **at)
            return directory
        except Exception as error:  # the hub client and its HTTP libraries raise many kinds of exceptions
            reason = hub.reason(error)
    raise UserError(
        source,
        found=f"neither a directory nor a reachable hub id ({reason})",
        expected="a directory or a hub id",
    )


def _copy_tokenizer(source: Path, target: Path) -> Path | None:
    """Copies the tokenizer files byte for byte; returns `target`, or None if there are no such files."""
    files = [source / name for name in TOKENIZER_FILES if look(source / name) == "file"]
    target.mkdir(exist_ok=True)
    for file in files:
        require_own(file)
        try:
            (target / file.name).write_bytes(read_small(file, VOCABULARY))
        except OSError as error:
            raise UserError(file, f"cannot be copied ({first_line(error)})") from error
    return target if files else None


def _size_in_words(params: Params) -> str:
    arrays = flatten_dict(params).values()
    return f"{sum(x.size for x in arrays) / 1e6:.3f} million parameters in {len(arrays)} tensors"
