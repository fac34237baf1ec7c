"""Writes event files of TensorBoard, with its own classes and without torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from trainer.track.tracker import Job, Place, Point, title_of

FOLDER = "tensorboard"


class TensorBoard:
    """A ``Tracker`` that writes into a folder. A resumed run writes a further event file beside the earlier ones."""

    def __init__(self, job: Job, options: Mapping[str, Any], known: str) -> None:
        self.place = Place(known or job.run_id, "", FOLDER)
        self._writer = EventFileWriter(str(job.folder / FOLDER))
        self._text("config", json.dumps(job.config, indent=1))

    def log(self, points: Sequence[Point]) -> None:
        for point in points:
            values = [Summary.Value(tag=name, simple_value=value) for name, value in point.values.items()]
            self._writer.add_event(Event(step=point.at, wall_time=point.t, summary=Summary(value=values)))
        self._writer.flush()

    def end(self, state: str, summary: Mapping[str, Any]) -> None:
        self._text("report", title_of({"state": state, **summary}))
        self._writer.close()

    def _text(self, tag: str, text: str) -> None:
        # as torch.utils.tensorboard's add_text; four spaces make it a block of code
        block = "\n".join(f"    {line}" for line in text.splitlines())
        shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)])
        tensor = TensorProto(dtype=DT_STRING, string_val=[block.encode()], tensor_shape=shape)
        metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
        value = Summary.Value(tag=f"{tag}/text_summary", metadata=metadata, tensor=tensor)
        self._writer.add_event(Event(summary=Summary(value=[value])))
