"""Tests of deploy/: rendered manifests, images, and processes started as the manifests say."""
