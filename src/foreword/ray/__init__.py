"""Foreword on Ray: an application of Ray Serve, a stage of Ray Data, and batches over actors.

They need the packages of foreword[ray].
"""
