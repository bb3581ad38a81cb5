"""Which tests run in one process, beside one another's compiled programs."""

from xdist.scheduler import LoadFileScheduling

SHARING_FOLDERS = ("tests/cli", "tests/training")
"""Their files train the same small models, each of which a second process would compile again."""


class ByPrograms(LoadFileScheduling):
    """A file stays on one worker, and of two workers so does a folder that shares programs.

    More workers share the folders' files, which would hold one worker up longer than all others.
    """

    def _split_scope(self, nodeid: str) -> str:
        folder = nodeid.split("::", 1)[0].rpartition("/")[0]
        if folder in SHARING_FOLDERS and self.numnodes <= 2:
            return folder
        return super()._split_scope(nodeid)
