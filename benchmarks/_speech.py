"""Speech to transcribe: sentences that eSpeak NG reads aloud, and errors in words.

`make test-clients` installs the package with eSpeak NG.
"""

import ctypes
import functools as ft
import importlib
import re
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float


FRAMES = 600  # Six seconds: a fifth of the usual length, to save time.


@ft.cache
def synthesiser():
    """Return the library of eSpeak NG, initialised, and its sample rate."""
    loader = importlib.import_module("espeakng_loader")
    library = ctypes.CDLL(loader.get_library_path())
    rate = library.espeak_Initialize(1, 0, str(loader.get_data_path()).encode(), 0)
    assert rate > 0 and library.espeak_SetVoiceByName(b"en-us") == 0
    library.espeak_SetParameter(1, 150, 0)  # Words per minute.
    return library, rate


def speak(text: str) -> Float[np.ndarray, " samples"]:
    """Read a text aloud, at 16 kHz."""
    library, rate = synthesiser()
    pieces = []

    @ctypes.CFUNCTYPE(
        ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.c_void_p
    )
    def receive(samples, count, _):
        pieces.extend(samples[:count] if count else ())
        return 0

    library.espeak_SetSynthCallback(receive)
    data = text.encode()
    size = ctypes.c_size_t(len(data) + 1)
    assert library.espeak_Synth(data, size, 0, 0, 0, 1, None, None) == 0
    library.espeak_Synchronize()
    wave = np.asarray(pieces) / 2**15
    length = len(wave) * 16_000 // rate
    return (
        np.fft.irfft(np.fft.rfft(wave)[: length // 2 + 1], length) * length / len(wave)
    )


@ft.cache
def mel_filters() -> Float[np.ndarray, "80 201"]:
    """Return triangles that overlap, linear in frequency up to 1 kHz, then in pitch."""
    pitch = np.linspace(0, 15 + 27 * np.log(8) / np.log(6.4), 82)
    edges = np.where(
        pitch < 15, pitch * 200 / 3, 1000 * 6.4 ** (np.maximum(pitch - 15, 0) / 27)
    )
    slopes = edges[:, None] - np.linspace(0, 8000, 201)
    rise = -slopes[:-2] / np.diff(edges)[:-1, None]
    fall = slopes[2:] / np.diff(edges)[1:, None]
    return (
        np.maximum(0, np.minimum(rise, fall)) * (2 / (edges[2:] - edges[:-2]))[:, None]
    )


def log_mel(wave: Float[np.ndarray, " samples"]) -> Float[np.ndarray, "80 frames"]:
    wave = np.pad(np.pad(wave, (0, 160 * FRAMES - len(wave))), 200, mode="reflect")
    frames = np.lib.stride_tricks.sliding_window_view(wave, 400)[::160][:FRAMES]
    window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(400) / 400)
    power = np.abs(np.fft.rfft(frames * window)) ** 2
    logs = np.log10(np.maximum(mel_filters() @ power.T, 1e-10))
    return ((np.maximum(logs, logs.max() - 8) + 4) / 4).astype(np.float32)


def words(text: str) -> list[str]:
    return re.sub(r"[^a-z0-9 ]", "", text.lower()).split()


def distance(a: list[str], b: list[str]) -> int:
    """Return the number of words to insert, delete or replace."""
    row = np.arange(len(b) + 1)
    for i, word in enumerate(a, 1):
        last, row = row, np.full(len(b) + 1, i)
        for j, other in enumerate(b, 1):
            row[j] = min(last[j] + 1, row[j - 1] + 1, last[j - 1] + (word != other))
    return int(row[-1])


def word_error_rate(texts: Sequence[str], spoken: Sequence[str]) -> float:
    """Return the errors in all texts, relative to the number of spoken words."""
    pairs = [(words(x), words(y)) for x, y in zip(texts, spoken, strict=True)]
    return sum(distance(*pair) for pair in pairs) / sum(len(y) for _, y in pairs)
