"""A new process in 0.2 s: a fork of one that has torch and other libraries loaded, but no module of upstream or ours.

Python's own fork server does it; it imports this file, so nothing of ours may be imported here.
"""

import multiprocessing
import os
import runpy
import sys
import tempfile
import types
from pathlib import Path

LIBRARIES = """
    cv2 numpy onnx onnxruntime pandas requests seaborn torch.utils.data torch.utils.tensorboard
    torchvision.transforms.functional
""".split()
TESTS = Path(__file__).parents[1]
START = multiprocessing.get_context('forkserver')
START.set_forkserver_preload(LIBRARIES)


def fresh(*words, code=0, env=None, first=''):
    """Run `python WORDS...` in the patched tree, with one thread and torch loaded; returns stdout + stderr.

    The words are `-c CODE ...`, `-m MODULE ...` or `FILE ...`; `first` is Python code that runs before. Fails unless
    the process exits with `code`.
    """
    from conftest import TREE

    env = {**(env or os.environ), 'OMP_NUM_THREADS': '1'}  # upstream's import sets another number; torchrun hands it on
    with tempfile.NamedTemporaryFile() as said:
        words = [str(word) for word in words]
        process = START.Process(target=_run, args=(words, str(TREE), env, first, said.name))
        process.start()
        process.join()
        text = Path(said.name).read_text(errors='replace')
    assert process.exitcode == code, f'{words}: exit code {process.exitcode}\n{text[-3000:]}'
    return text


def _run(words, cwd, env, first, said):
    with open(said, 'wb') as file, open(os.devnull, 'rb') as nothing:
        for to, stream in ((0, nothing), (1, file), (2, file)):
            os.dup2(stream.fileno(), to)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    sys.modules['torch'].set_num_threads(1)
    foreign = [f for f in sys.path if f and TESTS not in (Path(f), *Path(f).parents) and Path(f) != Path(cwd)]
    sys.path[:] = ['' if words[0] in ('-c', '-m') else os.path.dirname(os.path.abspath(words[0])), *foreign]
    if first:
        exec(first, {'__name__': 'first'})
    kind, *rest = words if words[0] in ('-c', '-m') else ['', *words]
    sys.argv = ['-c', *rest[1:]] if kind == '-c' else rest
    if kind == '-c':
        main = sys.modules['__main__'] = types.ModuleType('__main__')
        exec(compile(rest[0], '<string>', 'exec'), vars(main))
    elif kind == '-m':
        runpy.run_module(rest[0], run_name='__main__', alter_sys=True)
    else:
        runpy.run_path(rest[0], run_name='__main__')
