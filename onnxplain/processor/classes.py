"""Hugging Face's image processors whose preprocessing is known, and what each does unasked.

A file holds what its processor was made with; older files leave out what was the default. Where
transformers 4 and 5 have different defaults (None), a file has to say it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["PROCESSORS", "Processor", "processor_of"]

HALF = {"image_mean": 0.5, "image_std": 0.5}
IMAGENET = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}
OPENAI = {
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
EVERYWHERE = {
    "do_resize": True,
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "do_center_crop": False,
}
BILINEAR, BICUBIC = 2, 3


@dataclass(frozen=True)
class Processor:
    """A class of image processors.

    Attributes:
        square: Whether a size of one number is height and width, not the shorter side.
        own: Its defaults beside those that all have; what only this class has is among them.
    """

    square: bool
    own: Mapping[str, Any]

    @property
    def defaults(self) -> dict[str, Any]:
        return {**EVERYWHERE, **self.own}


def _clip() -> Processor:
    crop = {"do_center_crop": True, "crop_size": 224}
    return Processor(False, {**OPENAI, "resample": BICUBIC, "size": 224, **crop})


def _mobile_net() -> Processor:
    crop = {"do_center_crop": True, "crop_size": 224}
    return Processor(False, {**HALF, "resample": BILINEAR, "size": 256, **crop})


PROCESSORS: dict[str, Processor] = {
    "Beit": Processor(
        True,
        {**HALF, "resample": BICUBIC, "size": None, "do_center_crop": None, "crop_size": 224},
    ),
    "Bit": _clip(),  # DINOv2's
    "Blip": Processor(True, {**OPENAI, "resample": BICUBIC, "size": 384}),
    "CLIP": _clip(),
    "ConvNext": Processor(False, {**HALF, "resample": None, "size": 384, "crop_pct": 0.875}),
    "DINOv3ViT": Processor(True, {**IMAGENET, "resample": BILINEAR, "size": 224}),
    "DeiT": Processor(
        True,
        {**HALF, "resample": BICUBIC, "size": 256, "do_center_crop": True, "crop_size": 224},
    ),
    "EfficientNet": Processor(
        True,
        {
            **HALF,
            "resample": None,
            "size": 346,
            "crop_size": 289,
            "rescale_offset": False,
            "include_top": True,
        },
    ),
    "MobileNetV1": _mobile_net(),
    "MobileNetV2": _mobile_net(),
    "MobileViT": Processor(
        False,
        {
            "do_normalize": False,
            "size": 224,
            "do_center_crop": True,
            "crop_size": 256,
            "do_flip_channel_order": True,
            "resample": None,
        },
    ),
    "Pvt": Processor(True, {**IMAGENET, "resample": None, "size": 224}),
    "Segformer": Processor(True, {**IMAGENET, "resample": BILINEAR, "size": 512}),
    "Siglip": Processor(False, {**HALF, "resample": BICUBIC, "size": [224, 224]}),
    "ViT": Processor(True, {**HALF, "resample": BILINEAR, "size": 224}),
}
ENDINGS = ("ImageProcessor", "ImageProcessorFast", "ImageProcessorPil", "FeatureExtractor")
NAMES = {stem + ending: stem for stem in PROCESSORS for ending in ENDINGS}

# By the model_type of config.json, for files that name no class.
MODELS = {
    "beit": "Beit",
    "clip": "CLIP",
    "convnext": "ConvNext",
    "convnextv2": "ConvNext",
    "data2vec-vision": "Beit",
    "deit": "DeiT",
    "dinov2": "Bit",
    "ijepa": "ViT",
    "mobilevit": "MobileViT",
    "mobilevitv2": "MobileViT",
    "pvt": "Pvt",
    "pvt_v2": "Pvt",
    "regnet": "ConvNext",
    "resnet": "ConvNext",
    "segformer": "Segformer",
    "siglip": "Siglip",
    "swin": "ViT",
    "swinv2": "ViT",
    "vit": "ViT",
    "vit_mae": "ViT",
    "vit_msn": "ViT",
}


def processor_of(name: str) -> Processor | None:
    """The processor of a class's name, or of the model_type of a `config.json`."""
    stem = NAMES.get(name) or MODELS.get(name)
    return None if stem is None else PROCESSORS[stem]
