"""Image processor of the tiny Kimi-K2.5: images and video chunks to patches and their grid.

A medium is a dictionary as vLLM passes it: ``{"type": "image", "image": PIL image}`` or
``{"type": "video_chunk", "video_chunk": [PIL image, …]}``.
"""

import math

import numpy as np
import torch
from PIL import Image
from transformers.image_processing_utils import BaseImageProcessor, BatchFeature


class KimiK25VisionProcessor(BaseImageProcessor):
    """Scales a medium into the limits of `media_proc_cfg`, and cuts it into square patches."""

    model_type = "kimi_k25"

    def __init__(self, media_proc_cfg, **kwargs):
        super().__init__(**kwargs)
        self.media_proc_cfg = media_proc_cfg

    @property
    def num_frames_per_chunk(self):
        return self.media_proc_cfg["temporal_merge_kernel_size"]

    def media_tokens_calculator(self, media):
        """The number of placeholder tokens of a medium: all frames of a chunk share them."""
        rows, columns = self._grid(_frames(media))
        return rows * columns // self.media_proc_cfg["merge_kernel_size"] ** 2

    def split_video_chunks(self, video):
        """Splits frames, arrays [height, width, 3] of bytes, into chunks that are pooled over time,
        each with the text that stands for it in a prompt."""
        frames = [Image.fromarray(np.asarray(frame, dtype=np.uint8)) for frame in video]
        chunks = []
        for start in range(0, len(frames), self.num_frames_per_chunk):
            seconds = start / self.media_proc_cfg["sample_fps"]
            time = f"{int(seconds) // 3600:02}:{int(seconds) // 60 % 60:02}:{seconds % 60:06.3f}"
            chunks.append(
                {
                    "type": "video_chunk",
                    "video_chunk": frames[start : start + self.num_frames_per_chunk],
                    "prompt": f"{time}<|media_begin|>video<|media_content|><|media_pad|><|media_end|>",
                }
            )
        return chunks

    def preprocess(self, medias, return_tensors=None, do_rescale=True, do_normalize=True, **kwargs):
        """Returns ``pixel_values`` [patches, 3, size, size], float32, and ``grid_thws`` [media, 3],
        the frames, rows and columns of patches of each medium."""
        medias = medias if isinstance(medias, list) else [medias]
        patches, grids = [], []
        for media in medias:
            frames = _frames(media)
            rows, columns = self._grid(frames)
            grids.append((len(frames), rows, columns))
            patches += [self._patches(frame, rows, columns, do_normalize) for frame in frames]
        if not medias:
            return BatchFeature(data={}, tensor_type=return_tensors)
        data = {
            "pixel_values": torch.from_numpy(np.concatenate(patches)),
            "grid_thws": torch.tensor(grids),
        }
        return BatchFeature(data=data, tensor_type=return_tensors)

    def _grid(self, frames):
        """The rows and columns of patches: multiples of what the projector merges."""
        limits = self.media_proc_cfg
        limit = (
            limits["in_patch_limit"] if len(frames) == 1 else limits["in_patch_limit_each_frame"]
        )
        merge, size = limits["merge_kernel_size"], limits["patch_size"]
        width, height = frames[0].size
        scale = min(1.0, math.sqrt(limit * size * size / (width * height)))

        def count(length):
            patches = math.ceil(length * scale / (size * merge)) * merge
            return min(patches, limits["patch_limit_on_one_side"])

        return count(height), count(width)

    def _patches(self, frame, rows, columns, normalize):
        size = self.media_proc_cfg["patch_size"]
        scaled = frame.convert("RGB").resize((columns * size, rows * size))
        pixels = np.asarray(scaled, dtype=np.float32)
        if normalize:
            mean = np.asarray(self.media_proc_cfg["image_mean"], dtype=np.float32)
            deviation = np.asarray(self.media_proc_cfg["image_std"], dtype=np.float32)
            pixels = (pixels / 255 - mean) / deviation
        grid = pixels.reshape(rows, size, columns, size, 3)
        return grid.transpose(0, 2, 4, 1, 3).reshape(-1, 3, size, size)


def _frames(media):
    return [media["image"]] if media["type"] == "image" else list(media["video_chunk"])
