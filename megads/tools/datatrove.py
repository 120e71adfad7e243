"""Steps of a datatrove pipeline that make a dataset: what datatrove reads, filters and deduplicates, megads tokenizes.

    writer = MegadsWriter("data/web", "tokenizer.json")
    write = LocalPipelineExecutor(pipeline=[JsonlReader("raw/"), LambdaFilter(...), writer], tasks=8)
    LocalPipelineExecutor(pipeline=[MegadsJoin(writer)], depends=write).run()

Any executor of datatrove runs them. A task that is killed is run again, as datatrove does with any task.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

try:
    from datatrove.data import Document
    from datatrove.pipeline.base import PipelineStep
except ImportError as error:
    raise ImportError(f"datatrove is not installed ({error}): pip install 'megads[datatrove]'") from error

from megads.data.config import TextSpecialTokens
from megads.data.prepare.config import Engine
from megads.data.prepare.document_ranks import DocumentRank, ExternalDocument, join_ranks, refuse_output
from megads.data.prepare.tokenizing import Tokenizing
from megads.errors import ConfigError
from megads.runtime.environment import exported

_ORDERS = ("file", "rank")


class MegadsWriter(PipelineStep):
    """Tokenizes the documents of each task into parts of a dataset, and passes them on.

    The dataset is complete once `MegadsJoin` has joined the parts. Its documents are in the order of the names of the
    files that they were read from (`file_path` of their metadata, which datatrove's readers of files set), those of one
    file as they came. So its bytes do not depend on the number of tasks, as long as no file is read by several of them
    and no other step depends on it.

    Args:
        output: prefix of the <output>.bin and <output>.idx to write, in a folder that all tasks see.
        tokenizer: file in the format of Hugging Face `tokenizers`.
        end_of_document: token appended to every document; None appends none.
        text_special_tokens: ignore: text that spells a special token is ordinary text; parse: it is the token.
        engine: hf, fast or auto, as `megads preprocess` has it.
        order: file; or rank, for documents in the order of the tasks, whatever files they come from.
        overwrite: replace a dataset that is there.

    Raises:
        ConfigError: a setting is none of those that are known.
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
    ) -> None:
        super().__init__()
        self.output, self.tokenizer, self.end_of_document = str(output), str(tokenizer), end_of_document
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
            DataError: a damaged tokenizer file, or a full disk.
        """
        refuse_output(self.output, self.overwrite)
        # A task has one core as a rule.
        with exported({"TOKENIZERS_PARALLELISM": "false"}):
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
        """Loads the tokenizer; raises as `run` does."""
        return Tokenizing(
            self.tokenizer,
            self.output,
            self.end_of_document,
            "end_of_document",
            TextSpecialTokens(self.text_special_tokens),
        )


class MegadsJoin(PipelineStep):
    """Joins the parts that the tasks of a `MegadsWriter` have written, by copying: the pipeline of one task, run when
    the others are complete.

    Args:
        writer: the step that wrote them.
    """

    name = "megads dataset, joined"
    type = "TOKENIZER"

    def __init__(self, writer: MegadsWriter) -> None:
        super().__init__()
        self.writer = writer

    def run(self, data: Iterable[Document] | None = None, rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        """Joins them, in the first task.

        Raises:
            ConfigError: the tasks have written nothing with these settings.
            DataError: a task is missing, a part is damaged, or the disk is full.
        """
        if rank == 0:
            with self.track_time("dataset"):
                sidecar = join_ranks(self.writer.tokenizing(), Engine(self.writer.engine))
            self.stat_update("documents", value=sidecar.documents, unit="dataset")
            self.stat_update("tokens", value=sidecar.tokens, unit="dataset")
        yield from data or ()
