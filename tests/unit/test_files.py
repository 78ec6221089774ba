"""Laws of names: which file a word means, and how files of one name are told apart."""

from pathlib import Path

import pytest

from utils.qat.core import files
from utils.qat.core.errors import QatError
from utils.qat.core.files import distinct_names, in_tree, is_network, require_own


def test_files_of_one_name_are_told_apart_by_their_path_and_then_by_their_place():
    a, b, other = Path('a/x.pt'), Path('b/x.pt'), Path('y.pt')
    assert distinct_names([a, other]) == ['x.pt', 'y.pt']
    assert distinct_names([a, b, other]) == ['a/x.pt', 'b/x.pt', 'y.pt']
    assert distinct_names([a, a, other]) == ['a/x.pt (1)', 'a/x.pt (2)', 'y.pt']


def test_a_network_is_a_name_and_no_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for word, network in (('resnet18', True), ('resnet18.pt', False), ('yolo', False)):
        assert is_network(Path(word)) == network
    Path('resnet18').touch()
    assert not is_network(Path('resnet18')), 'a file of that name is the file'


def test_a_bare_name_of_two_files_in_the_tree_names_neither(tmp_path, monkeypatch):
    monkeypatch.setattr(files, 'TREE', tmp_path)
    for name in ('data/one.yaml', 'data/two.yaml', 'models/two.yaml'):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert in_tree('one.yaml') == tmp_path / 'data/one.yaml' and in_tree('two.yaml') == Path('two.yaml')


OWN = {  # what is there, what is to be written → it is ours
    'the same': ('text\n', 'text\n', True),
    'one byte more': ('text\nx', 'text\n', False),
    'one byte less': ('text', 'text\n', False),
    'the same source': ('# m.pt\nold', '# m.pt\nnew', True),
    'another source': ('# n.pt\nnew', '# m.pt\nnew', False),
    'a first line that goes on': ('# m.pt2\nold', '# m.pt\nnew', False),
    'a first line that is no comment': ('m.pt\nold', 'm.pt\nnew', False),
}


@pytest.mark.parametrize('case', OWN)
def test_only_a_file_of_the_same_source_is_replaced(case, tmp_path):
    there, text, ours = OWN[case]
    (tmp_path / 'labels.txt').write_text(there)
    if ours:
        require_own(tmp_path / 'labels.txt', text)
    else:
        with pytest.raises(QatError, match='is there already'):
            require_own(tmp_path / 'labels.txt', text)
