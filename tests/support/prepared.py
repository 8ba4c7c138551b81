"""Data sets as TensorFlow Datasets prepares them."""

import tensorflow_datasets as tfds
from array_record.python.array_record_module import ArrayRecordWriter


def write_info(builder, features, folder, splits):
    """Writes the files of a prepared data set: metadata, and records if there are rows."""
    folder.mkdir(parents=True)
    infos = []
    for split, rows in splits.items():
        template = tfds.core.ShardedFileTemplate(
            dataset_name=builder.name, data_dir=folder, split=split, filetype_suffix="array_record"
        )
        if features is not None:
            writer = ArrayRecordWriter(
                str(template.sharded_filepath(shard_index=0, num_shards=1)), "group_size:1"
            )
            for row in rows:
                writer.write(features.serialize_example(row))
            writer.close()
        infos.append(
            tfds.core.SplitInfo(
                name=split, shard_lengths=[len(rows)], num_bytes=1, filename_template=template
            )
        )
    builder.info.set_splits(tfds.core.splits.SplitDict(infos))
    builder.info.write_to_directory(folder)
