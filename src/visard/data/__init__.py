"""Face data: sets on disk, importers, partitions into clients, augmentation."""

from visard.data.faces import ClientData, FaceSet, FaceSetWriter, FaceView, Federation

__all__ = ["ClientData", "FaceSet", "FaceSetWriter", "FaceView", "Federation"]
