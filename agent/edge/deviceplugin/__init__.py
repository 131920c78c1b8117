"""Kubelet's device plugin API: our devices, told and given out."""

from agent.edge.deviceplugin.plugin import Answers, DevicePlugin

__all__ = ["Answers", "DevicePlugin"]
