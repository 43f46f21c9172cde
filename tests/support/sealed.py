"""Files of safetensors that another writer sealed well: any tensors and texts, with the right digest of the header."""

import json

import numpy as np
from safetensors.numpy import save_file

from jshadow.engine.saved.file import header_digest
from jshadow.weights.convert.safetensors_file import TensorFile


def content_of(path):
    """The tensors of a sealed file, as arrays that can be changed, and its texts without the digest of the header."""
    file = TensorFile(path)
    texts = {name: text for name, text in file.metadata.items() if name != "header_sha256"}
    return {name: np.array(file.read(name)) for name in file.shapes}, texts


def seal(path, tensors, texts):
    """Write tensors and texts, and the digest of a header with them."""
    save_file(tensors, path)
    file = TensorFile(path)
    table = {name: (file.tags[name], file.shapes[name]) for name in tensors}
    save_file(tensors, path, texts | {"header_sha256": header_digest(texts, table)})


def parts_of(index):
    """The files of a state in parts, by the number of their process."""
    folder = json.loads(TensorFile(index).metadata["parts"])[0]["file"].split("/")[0]
    return sorted((index.parent / folder).iterdir())
