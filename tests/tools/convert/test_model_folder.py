"""What of a Hugging Face folder survives import, training and export, besides the weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from megads.api import model_config_of
from megads.checkpoint.read import open_checkpoint
from megads.data.indexed.run_tokenizer import keep_files_of_run
from megads.data.indexed.sidecar import template_beside
from megads.errors import ConfigError
from megads.evaluate.config import GenerateConfig
from megads.evaluate.generation import GenerationSpeed
from megads.model.config import ModelConfig
from megads.tools.convert import export, load
from megads.tools.convert.architectures import ARCHITECTURES
from megads.tools.convert.export_config import ExportConfig
from megads.tools.convert.import_config import ImportConfig
from megads.tools.generate import text_generator
from megads.tools.prepare.chat import PLAIN_TEMPLATE
from tests.command import StartCommand, steps_of
from tests.small_run import TEXTS, TOKENS
from tests.test_conf import compose_train
from tests.tools.convert import families
from tests.tools.convert.test_formats import BASE, CASES, exported, hot_model, tokenizer

__all__ = ["tokenizer"]
transformers = pytest.importorskip("transformers")

BOS, EOS, PAD, UNK, TURN, CALL = "<s>", "</s>", "<pad>", "<unk>", "<|turn|>", "<|call|>"
# Its answers end with TURN, not with EOS.
CHAT = (
    "{{ bos_token }}{% for m in messages %}{{ '<|start|>' + m['role'] + '\\n' + m['content'] + '<|turn|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant\\n' }}{% endif %}"
)
SETTINGS = ("tokenizer_config.json", "generation_config.json", "special_tokens_map.json")


def their_tokenizer(template: str | None = CHAT) -> Any:
    """A tokenizer of transformers that puts BOS before every text, with further special tokens."""
    words = Tokenizer(models.BPE())
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    special = [UNK, BOS, EOS, PAD, "<|start|>", TURN, CALL]
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=special, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )  # fmt: skip
    words.train_from_iterator(TEXTS, trainer)
    words.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, 1)])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, bos_token=BOS, eos_token=EOS, pad_token=PAD, unk_token=UNK, padding_side="left",
        extra_special_tokens=["<|start|>", TURN, CALL], model_max_length=4096, chat_template=template,
    )  # fmt: skip


def write_their_folder(folder: Path, template: str | None = CHAT, family: str = "llama") -> Path:
    """A model with random weights, saved by transformers with settings that are not its defaults."""
    their_tokenizer(template).save_pretrained(folder)
    ids: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": [2, 6], "pad_token_id": 3}
    model = families.their_model(family, {**families.CASES[family][0], "vocab_size": 330, **ids})
    model.generation_config = transformers.GenerationConfig(**ids, do_sample=True, temperature=0.6, top_p=0.9)
    model.save_pretrained(folder)
    # As transformers 4 writes it.
    (folder / "special_tokens_map.json").write_text(json.dumps({"bos_token": {"content": BOS}, "eos_token": EOS}))
    return folder


def read(path: Path) -> Any:
    return json.loads(path.read_bytes())


def imported(tmp_path: Path, family: str = "llama") -> tuple[Path, Path]:
    """Returns the folder of transformers and the run that it was imported to."""
    theirs = write_their_folder(tmp_path / "theirs", family=family)
    (theirs / "adapter_config.json").write_text("{}")
    return theirs, load.import_folder(ImportConfig(str(theirs), str(tmp_path / "base"))).folder


def export_of(run_dir: Path) -> Path:
    output = run_dir.with_name(f"{run_dir.name}-out")
    return export.export_checkpoint(ExportConfig(str(run_dir), str(output))).folder


def trained(base: Path, name: str, template: str | None) -> Path:
    """A run that started from another, with the chat template of its conversations, as `megads train` leaves it."""
    run_dir = base.with_name(name)
    run_dir.mkdir()
    shutil.copytree(base / "checkpoints", run_dir / "checkpoints")
    shutil.copyfile(base / "tokenizer.json", run_dir / "tokenizer.json")
    if template is not None:
        (run_dir / "chat_template.jinja").write_text(template)
    keep_files_of_run(base, run_dir)
    return run_dir


@pytest.mark.always("llama", "gemma3_text")
@pytest.mark.parametrize("family", families.CASES)
def test_a_model_of_every_family_survives_import_training_and_export(family: str, tmp_path: Path) -> None:
    """Catches lost special tokens, a list of end tokens cut to one, lost sampling settings or chat template, a file
    that changes what transformers loads, a preset of another model, and a model that leaves as another family."""
    theirs, base = imported(tmp_path, family)
    preset = compose_train("model=imported", f"hydra.searchpath=[{base}]").model
    assert preset == model_config_of(open_checkpoint(base))
    ours = export_of(trained(base, "more", None))
    for name in (*SETTINGS, "chat_template.jinja", "tokenizer.json"):
        assert (ours / name).read_bytes() == (theirs / name).read_bytes()
    before, after = read(theirs / "config.json"), read(ours / "config.json")
    for key in ("model_type", "architectures", "bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings"):
        assert after[key] == before[key]
    assert not (ours / "adapter_config.json").exists()
    words, again = (transformers.AutoTokenizer.from_pretrained(folder) for folder in (theirs, ours))
    assert again.special_tokens_map == words.special_tokens_map
    assert again("attention 1").input_ids == words("attention 1").input_ids
    # The next run starts from the export.
    back = load.import_folder(ImportConfig(str(ours), str(tmp_path / "back"))).folder
    assert read(export_of(back) / "generation_config.json") == read(theirs / "generation_config.json")


def test_training_changes_the_ends_only(tmp_path: Path) -> None:
    """Catches a chat template that vanishes in pretraining, and an end of a turn that other engines do not stop at."""
    theirs, base = imported(tmp_path)
    pretrained = trained(base, "pretrained", None)
    ours = export_of(pretrained)
    assert read(ours / "config.json")["eos_token_id"] == [2, 6]
    assert template_beside(pretrained / "tokenizer.json") == CHAT
    assert (ours / "chat_template.jinja").read_text() == CHAT

    chat = trained(base, "chat", CHAT)
    ours = export_of(chat)
    settings, generation = read(ours / "tokenizer_config.json"), read(ours / "generation_config.json")
    turn = read(theirs / "tokenizer.json")["model"]["vocab"][TURN]
    assert read(ours / "config.json")["eos_token_id"] == generation["eos_token_id"] == [2, 6, turn]
    assert (generation["temperature"], generation["top_p"]) == (0.6, 0.9)
    # Engines such as CTranslate2 stop at the tokenizer's token only.
    assert settings == read(theirs / "tokenizer_config.json") | {"eos_token": TURN}
    assert read(ours / "special_tokens_map.json")["eos_token"] == TURN
    # A run that goes on from the chat model keeps what that one learnt.
    assert read(export_of(trained(chat, "more", None)) / "config.json")["eos_token_id"] == [2, 6, turn]

    # The plain template writes eos_token, which must stay the token that the model has learnt.
    plain = export_of(trained(base, "plain", PLAIN_TEMPLATE))
    assert read(plain / "tokenizer_config.json")["eos_token"] == EOS
    assert read(plain / "config.json")["eos_token_id"] == [2, 6]
    assert (plain / "chat_template.jinja").read_text() == PLAIN_TEMPLATE


def test_a_template_within_the_settings_is_replaced(tmp_path: Path) -> None:
    """Catches two templates in an export, of which engines read different ones."""
    theirs = write_their_folder(tmp_path / "theirs", None)
    settings = read(theirs / "tokenizer_config.json")
    (theirs / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": "old"}))
    base = load.import_folder(ImportConfig(str(theirs), str(tmp_path / "base"))).folder
    assert read(export_of(base) / "tokenizer_config.json")["chat_template"] == "old"
    ours = export_of(trained(base, "chat", CHAT))
    assert read(ours / "tokenizer_config.json")["chat_template"] == CHAT
    assert transformers.AutoTokenizer.from_pretrained(ours).chat_template == CHAT


def test_a_folder_without_settings_gets_them(tmp_path: Path) -> None:
    """Catches an export without tokens that config.json alone tells, and without a padding token."""
    theirs = write_their_folder(tmp_path / "theirs")
    for name in (*SETTINGS, "chat_template.jinja"):
        (theirs / name).unlink()
    config = read(theirs / "config.json")
    (theirs / "config.json").write_text(json.dumps(config | {"pad_token_id": None}))
    ours = export_of(load.import_folder(ImportConfig(str(theirs), str(tmp_path / "base"))).folder)
    settings = read(ours / "tokenizer_config.json")
    assert (settings["bos_token"], settings["eos_token"], settings["pad_token"]) == (BOS, EOS, PAD)
    assert read(ours / "generation_config.json") == {"bos_token_id": 1, "eos_token_id": [2, 6], "pad_token_id": 3}
    # A padding token of the model would keep its embedding from being trained.
    assert read(ours / "config.json")["pad_token_id"] is None


def test_a_given_tokenizer_comes_with_its_settings(tmp_path: Path) -> None:
    """Catches the settings of the model's folder beside another tokenizer, and the lost template of a dataset."""
    theirs, base = imported(tmp_path)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for name in ("tokenizer.json", "chat_template.jinja"):
        shutil.copyfile(theirs / name, elsewhere / f"talks.{name}")
        (theirs / name).unlink()
    (theirs / "tokenizer_config.json").unlink()
    given = ImportConfig(str(theirs), str(tmp_path / "a"), tokenizer=str(elsewhere / "talks.tokenizer.json"))
    assert template_beside(load.import_folder(given).folder / "tokenizer.json") == CHAT
    given = ImportConfig(str(theirs), str(tmp_path / "b"), tokenizer=str(base / "tokenizer.json"))
    folder = load.import_folder(given).folder
    assert template_beside(folder / "tokenizer.json") == CHAT
    assert read(folder / "hugging_face" / "tokenizer_config.json")["bos_token"] == BOS
    assert read(folder / "hugging_face" / "generation_config.json")["top_p"] == 0.9


def test_bad_settings_are_named(tmp_path: Path) -> None:
    """Catches a traceback for a damaged file of the imported model."""
    _, base = imported(tmp_path)
    (base / "hugging_face" / "generation_config.json").write_text("[1]")
    with pytest.raises(ConfigError, match=r"generation_config\.json: cannot be read: holds no JSON object"):
        export_of(base)


def made_by_a_pipeline(folder: Path, chat: bool) -> None:
    """Checks that the pipeline of transformers makes the same greedy text one by one, in a batch, and by the model."""
    generator = transformers.pipeline("text-generation", model=str(folder))
    options = {"max_new_tokens": 6, "do_sample": False, "return_full_text": False}
    prompts = ["def attention_1", "def", "return softmax(query @ key) of the keys"]
    alone = [generator(prompt, **options)[0]["generated_text"] for prompt in prompts]
    assert [made[0]["generated_text"] for made in generator(prompts, batch_size=3, **options)] == alone
    ids = generator.tokenizer(prompts[0], return_tensors="pt").input_ids
    made = generator.model.generate(ids, max_new_tokens=6, do_sample=False)[0, ids.shape[1] :]
    assert generator.tokenizer.decode(made, skip_special_tokens=True) == alone[0]
    if chat:
        answer = generator([{"role": "user", "content": "attention 1?"}], **options)[0]["generated_text"]
        words = generator.tokenizer
        talk = words.apply_chat_template(
            [{"role": "user", "content": "attention 1?"}], add_generation_prompt=True, tokenize=False
        )
        assert talk.startswith(f"{BOS}<|start|>user") and talk.count(BOS) == 1
        encoded = words(talk, add_special_tokens=False, return_tensors="pt")
        made = generator.model.generate(**encoded, max_new_tokens=6, do_sample=False)[0, encoded.input_ids.shape[1] :]
        text = words.decode(made, skip_special_tokens=True)
        assert answer == text or answer[-1]["content"] == text


def test_pipelines_take_an_imported_model(tmp_path: Path) -> None:
    """Catches an export whose tokenizer has no padding token or no template, so that batches or messages fail."""
    _, base = imported(tmp_path)
    made_by_a_pipeline(export_of(trained(base, "chat", CHAT)), chat=True)


@pytest.mark.parametrize("name", ["bloom", "llama"])
def test_pipelines_take_a_model_of_megads(name: str, tmp_path: Path, tokenizer: Path) -> None:
    """Catches a batch that fails, or is padded on the wrong side, for a tokenizer that megads has trained."""
    changes = next(shape for some, shape in CASES if some == name)
    made_by_a_pipeline(exported(tmp_path, tokenizer, hot_model(ModelConfig(**(BASE | changes)))), chat=False)


def converted(folder: Path) -> Path:
    """Converts an export to the format of CTranslate2, by its own converter."""
    converters = pytest.importorskip("ctranslate2.converters", reason="CTranslate2 is not installed")
    return Path(converters.TransformersConverter(str(folder)).convert(str(folder.with_name("ctranslate2"))))


# Its loader of GPT-NeoX needs transformers 4, that of GPT-2 as many tokens as rows.
@pytest.mark.parametrize("name", ["bloom", "gpt2", "llama", "mistral", "qwen3"])
def test_another_engine_reads_an_export(name: str, tmp_path: Path, tokenizer: Path) -> None:
    """Catches an export that only transformers reads, such as one that names no unknown token, and other logits."""
    changes = next(shape for some, shape in CASES if some == name and not shape.get("rope_scaling"))
    shape = BASE | changes | {"tie_embeddings": False} | ({"vocab_size": TOKENS} if name == "gpt2" else {})
    folder = exported(tmp_path, tokenizer, hot_model(ModelConfig(**shape)))
    engine = converted(folder)
    words, model = (
        some.from_pretrained(folder) for some in (transformers.AutoTokenizer, transformers.AutoModelForCausalLM)
    )
    ids = words("def attention_1", return_tensors="pt").input_ids
    wanted = model.generate(ids, max_new_tokens=8, do_sample=False)[0, ids.shape[1] :].tolist()
    prompt = words.convert_ids_to_tokens(ids[0].tolist())
    generator = pytest.importorskip("ctranslate2").Generator(str(engine), compute_type="float32", intra_threads=1)
    (made,) = generator.generate_batch([prompt], max_length=8, sampling_topk=1, include_prompt_in_result=False)
    assert made.sequences_ids[0] == wanted[: len(made.sequences_ids[0])]
    assert len(made.sequences_ids[0]) in (8, len(wanted) - 1)


def test_another_engine_stops_at_the_end_of_a_turn(tmp_path: Path) -> None:
    """Catches a chat model that never stops in an engine that knows one end token."""
    _, base = imported(tmp_path)
    engine = converted(export_of(trained(base, "chat", CHAT)))
    assert read(engine / "config.json")["eos_token"] == TURN


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("family", families.CASES)
def test_a_training_keeps_what_it_started_from(family: str, tmp_path: Path, megads: StartCommand) -> None:
    """Catches a start that does not take the files of the imported model, a family that can be imported but not
    trained, and a training whose export lacks end tokens or weights."""
    theirs, _ = imported(tmp_path, family)
    (tmp_path / "text.txt").write_text("".join(TEXTS))
    given = ("--config-dir=base", "model=imported", "checkpoint.init_from=base", "data.raw=text.txt")
    short = ("train.steps=1", "train.seq_len=16", "train.global_batch_size=1", "train.micro_batch_size=1")
    ended = megads("train", *given, *short, f"tokenizer.end_of_document={EOS}", "run.id=more").end()
    assert ended.code == 0, ended.err
    run_dir = tmp_path / "runs" / "more"
    record = open_checkpoint(run_dir).manifest.run.tokenizer
    assert record is not None and not record.adds_special_tokens  # its documents have no BOS
    assert template_beside(run_dir / "tokenizer.json") == CHAT
    assert not (run_dir / "chat_template.jinja").exists()
    ours = export_of(run_dir)
    for name in SETTINGS:
        assert (ours / name).read_bytes() == (theirs / name).read_bytes()
    before, after = read(theirs / "config.json"), read(ours / "config.json")
    assert (after["eos_token_id"], after["model_type"]) == ([2, 6], before["model_type"])
    _, loading = transformers.AutoModelForCausalLM.from_pretrained(ours, output_loading_info=True)
    assert not any(loading[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), loading


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(
    "family",
    # Others are, inside, one of these.
    ["bloom", "cohere", "falcon", "gemma3_text", "gpt2", "gptj", "mpt", "olmo2", "phi", "qwen2", "smollm3"],
)
def test_three_tensor_parallel_ranks_train_a_model_alike(family: str, tmp_path: Path, megads: StartCommand) -> None:
    """Catches a family with three heads and a prime number of tokens whose weights are cut at other places than its
    heads, or whose padded rows take part in the loss."""
    settings = families.odd_case(family, ARCHITECTURES[family].tied, vocab_size=331)
    theirs = families.their_model(family, settings | {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3})
    their_tokenizer().save_pretrained(tmp_path / "theirs")
    theirs.save_pretrained(tmp_path / "theirs")
    load.import_folder(ImportConfig(str(tmp_path / "theirs"), str(tmp_path / "base")))
    (tmp_path / "text.txt").write_text("".join(TEXTS))
    given = ("--config-dir=base", "model=imported", "checkpoint.init_from=base", "data.raw=text.txt", "train.steps=2")
    size = ("train.seq_len=16", "train.global_batch_size=2", "train.precision=fp32")
    rate = ("optim.lr=0.001", "schedule.warmup_samples=0", f"tokenizer.end_of_document={EOS}")
    found = []
    for tp in (1, 3):
        ended = megads("train", *given, *size, *rate, f"parallel.tp={tp}", f"run.id=tp{tp}").end()
        assert ended.code == 0, ended.err
        first, second = steps_of(tmp_path / "runs" / f"tp{tp}")
        found.append([first["loss"], first["grad_norm"], second["loss"]])
    assert found[1] == pytest.approx(found[0], rel=1e-5)


def test_generation_stops_at_every_end_token(tmp_path: Path) -> None:
    """Catches generation that goes on behind an end token of the imported model, where transformers stops."""
    from megads import load_model

    theirs, base = imported(tmp_path)
    options: dict[str, Any] = {"max_new_tokens": 6, "temperature": 0.0}
    whole = load_model(base, dtype=torch.float32).generate("return", **options)
    words = transformers.AutoTokenizer.from_pretrained(theirs)
    ids = words("return", return_tensors="pt").input_ids
    model = transformers.AutoModelForCausalLM.from_pretrained(theirs)
    made = model.generate(ids, max_new_tokens=6, do_sample=False)[0, ids.shape[1] :].tolist()
    assert whole == words.decode(made)
    end = next(token for token in made if token != made[0])
    settings = base / "hugging_face" / "generation_config.json"
    settings.write_text(json.dumps(read(settings) | {"eos_token_id": [2, end]}))
    short = load_model(base, dtype=torch.float32).generate("return", **options)
    assert short == words.decode(made[: made.index(end)])


@pytest.mark.parametrize("special_tokens", [None, True, False])
def test_a_prompt_has_the_tokens_of_a_pipeline(special_tokens: bool | None, tmp_path: Path) -> None:
    """Catches an imported model that reads prompts without BOS, which it has seen before every text, and BOS twice
    before a chat template that writes it."""
    theirs, base = imported(tmp_path)
    words = transformers.AutoTokenizer.from_pretrained(theirs)
    with_bos, without = (words("attention 1", add_special_tokens=adds).input_ids for adds in (True, False))
    assert with_bos == [1, *without]

    def ids(**options: Any) -> list[int]:
        config = GenerateConfig(str(base), special_tokens=special_tokens, **options)
        return text_generator(config).prompt("attention 1").ids

    assert ids() == (without if special_tokens is False else with_bos)
    talk = [{"role": "user", "content": "attention 1"}]
    assert ids(chat=True) == words.apply_chat_template(talk, add_generation_prompt=True)["input_ids"]


def test_greedy_text_of_an_imported_model_is_that_of_a_pipeline(tmp_path: Path) -> None:
    """Catches prompts that `megads generate` tokenizes otherwise than transformers."""
    theirs, base = imported(tmp_path)
    pipeline = transformers.pipeline("text-generation", model=str(theirs))
    prompts = ["def attention_1", "return softmax(query @ key) of the keys"]
    generator = text_generator(GenerateConfig(str(base), temperature=0.0, max_new_tokens=6))
    made = list(generator.complete_all([generator.prompt(prompt) for prompt in prompts], 2, GenerationSpeed()))
    options = {"max_new_tokens": 6, "do_sample": False, "return_tensors": True}
    options["suppress_tokens"] = list(range(len(pipeline.tokenizer), 330))  # rows without a token
    for prompt, done in zip(prompts, made, strict=True):
        [out] = pipeline(prompt, **options)
        asked = pipeline.tokenizer(prompt).input_ids
        assert out["generated_token_ids"][: len(asked)] == asked
        text = pipeline.tokenizer.decode(out["generated_token_ids"][len(asked) :])
        assert done.text == text.rstrip("\ufffd")
