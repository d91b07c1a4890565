"""Modules: exported kernels on disk, in the process, and launched.

``link`` makes one from an object, ``store`` finds and checks it, ``loader`` opens it, ``kernel``
binds arguments and launches: ``arguments`` lays out those of our own kernels, in one ``block``,
``strangers`` those of others. ``staging`` does all of it for host arrays.
"""
