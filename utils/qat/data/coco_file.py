"""A JSON file in COCO's format: images, objects and categories."""

import re
from collections.abc import Mapping
from pathlib import Path

from utils.qat.core.errors import QatError, reporting
from utils.qat.untrusted.json_schema import INDEX, POSITIVE, anything, between, items, read_json

ID = int, str
PIXELS = between(-1e6, 1e6)
SIZE = {'width': between(1, 1e6), 'height': between(1, 1e6)}
# Run lengths as pycocotools packs them: six bits per character, one of which says that the number continues.
PACKED = re.compile('(?:[P-o]{0,6}[0-O])*')


def _is_polygon(value: object) -> bool:
    return type(value) is list and len(value) % 2 == 0 and items(PIXELS, 6)(value)


def _is_packed(value: object) -> bool:
    return type(value) is str and bool(PACKED.fullmatch(value))


RUNS = {
    'size': items(between(1, 1e6, (int,)), 2, 2),
    'counts': ([between(0, 2**32 - 1, (int,))], _is_packed),
    str: anything,
}
SCORED = {'id': ID, 'area': POSITIVE, 'iscrowd': between(0, 1, (int,))}  # of an object, for pycocotools
MASK = {'segmentation': (items(_is_polygon, 1), RUNS)}  # of an object, for masks as well


def read_coco(
    file: Path,
    who: str,
    image: Mapping[str, object] | None = None,
    thing: Mapping[str, object] | None = None,
    category: Mapping[str, object] | None = None,
) -> dict[str, list[dict]]:
    """Read a COCO file, and check that the image and the category of each object exist.

    `who` names the file in messages, with its flag. `image`, `thing` and `category` are further required values of each
    image, object and category: key → kind, see json_schema.
    """
    parts = {
        'images': {'id': ID, **(image or {})},
        'annotations': {'image_id': ID, 'category_id': INDEX, 'bbox': items(PIXELS, 4, 4), **(thing or {})},
        'categories': {'id': INDEX, **(category or {})},
    }
    kind: dict[object, object] = {key: [{**needs, str: anything}] for key, needs in parts.items()}
    with reporting(f'{who}: no COCO JSON of objects', ValueError, remedy='mend it, or fetch it again'):
        content = read_json(file, kind | {str: anything})
    images, categories = ({entry['id'] for entry in content[key]} for key in ('images', 'categories'))
    if len(images) < len(content['images']) or len(categories) < len(content['categories']):
        raise QatError(f'{who}: two of its images, or two of its categories, have the same id; mend it')
    for i, entry in enumerate(content['annotations']):
        if entry['image_id'] not in images or entry['category_id'] not in categories:
            raise QatError(f'{who}: annotations[{i}] is of an image or of a category that it does not have; mend it')
    return content
