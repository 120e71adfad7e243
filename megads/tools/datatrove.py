"""Steps of a datatrove pipeline that tokenize documents into a dataset of megads.

    writer = MegadsWriter("data/web", "tokenizer.json")
    write = LocalPipelineExecutor(pipeline=[JsonlReader("raw/"), LambdaFilter(...), writer], tasks=8)
    LocalPipelineExecutor(pipeline=[MegadsJoin(writer)], depends=write).run()

They run in any executor of datatrove, which reruns killed tasks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

try:
    from datatrove.data import Document
    from datatrove.pipeline.base import PipelineStep
except ImportError as error:
    raise ImportError(f"datatrove is not installed ({error}): pip install 'megads[datatrove]'") from error

from megads.api import ConfigError, Engine, TextSpecialTokens, child_environment
from megads.tools.prepare.document_ranks import DocumentRank, ExternalDocument, join_ranks, refuse_output
from megads.tools.prepare.tokenizing import Tokenizing

_ORDERS = ("file", "rank")


class MegadsWriter(PipelineStep):
    """Tokenizes the documents of each task into a part of a dataset, and yields the documents.

    `MegadsJoin` joins the parts to the dataset. Its documents are ordered by the name of the file that they were read
    from (`file_path` of their metadata, which datatrove's file readers set); documents of one file keep their order.
    The bytes of the dataset do not depend on the number of tasks, unless several tasks read one file or another step
    depends on the number of tasks.

    Args:
        output: prefix of <output>.bin and <output>.idx, in a folder that all tasks can write to.
        tokenizer: file in the format of Hugging Face `tokenizers`.
        end_of_document: token appended to every document; None appends none.
        text_special_tokens: how text that spells a special token is tokenized: ignore, as ordinary text; parse, as the
            special token.
        engine: hf, fast or auto, as in `megads preprocess`.
        order: file, or rank for documents in the order of the tasks, regardless of files.
        overwrite: replace an existing dataset.
        begin_of_document: token before every document; None puts none.

    Raises:
        ConfigError: a setting has an unknown value.
    """

    name = "megads dataset"
    type = "TOKENIZER"

    def __init__(
        self,
        output: str,
        tokenizer: str,
        end_of_document: str | None = "<|endoftext|>",
        text_special_tokens: str = "ignore",
        engine: str = "auto",
        order: str = "file",
        overwrite: bool = False,
        begin_of_document: str | None = None,
    ) -> None:
        super().__init__()
        self.output, self.tokenizer, self.end_of_document = str(output), str(tokenizer), end_of_document
        self.begin_of_document = begin_of_document
        self.order, self.overwrite = order, overwrite
        for name, value, known in (
            ("text_special_tokens", text_special_tokens, list(TextSpecialTokens)),
            ("engine", engine, list(Engine)),
            ("order", order, _ORDERS),
        ):
            if value not in known:
                raise ConfigError(f"{name} = {value}: want one of {', '.join(known)}")
        self.text_special_tokens, self.engine = text_special_tokens, engine

    def run(self, data: Iterable[Document] | None, rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        """Tokenizes the documents of one task.

        Raises:
            ConfigError: the output exists, or the end-of-document token is not in the tokenizer.
            DataError: the tokenizer file is damaged, or the disk is full.
        """
        refuse_output(self.output, self.overwrite)
        # A task usually has one core.
        with child_environment({"TOKENIZERS_PARALLELISM": "false"}):
            writer = DocumentRank(self.tokenizing(), Engine(self.engine), rank, world_size)
            for document in data or ():
                with self.track_time():
                    file = str(document.metadata.get("file_path", "")) if self.order == "file" else ""
                    writer.add(ExternalDocument(document.text, str(document.id), file))
                    self.stat_update("documents")
                yield document
            with self.track_time():
                writer.finish()
            self.stat_update("tokens", value=writer.num_tokens, unit="task")

    def tokenizing(self) -> Tokenizing:
        """Loads the tokenizer; raises the same errors as `run`."""
        return Tokenizing(
            self.tokenizer,
            self.output,
            self.end_of_document,
            "end_of_document",
            TextSpecialTokens(self.text_special_tokens),
            begin_of_document=self.begin_of_document,
        )


class MegadsJoin(PipelineStep):
    """Joins the parts written by the tasks of a `MegadsWriter`, by copying. Runs as one task after the others.

    Args:
        writer: the step that wrote the parts.
    """

    name = "megads dataset, joined"
    type = "TOKENIZER"

    def __init__(self, writer: MegadsWriter) -> None:
        super().__init__()
        self.writer = writer

    def run(self, data: Iterable[Document] | None = None, rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        """Joins the parts, in task 0.

        Raises:
            ConfigError: no task has written a part with these settings.
            DataError: the part of a task is missing or damaged, or the disk is full.
        """
        if rank == 0:
            with self.track_time("dataset"):
                sidecar = join_ranks(self.writer.tokenizing(), Engine(self.writer.engine))
            self.stat_update("documents", value=sidecar.documents, unit="dataset")
            self.stat_update("tokens", value=sidecar.tokens, unit="dataset")
        yield from data or ()
