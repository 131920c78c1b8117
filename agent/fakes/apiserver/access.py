"""Users, and what they may do."""

from dataclasses import dataclass

from agent.fakes.apiserver.store import StatusError


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """As in a Role; "*" stands for any. A subresource is written `nodes/status`."""

    verbs: tuple[str, ...]
    resources: tuple[str, ...]
    groups: tuple[str, ...] = ("",)
    names: tuple[str, ...] = ()
    namespaces: tuple[str, ...] = ()

    def allows(self, access: "Access") -> bool:
        resource = "/".join(filter(None, (access.resource, access.subresource)))
        return (
            bool({"*", access.verb} & set(self.verbs))
            and bool({"*", access.group} & set(self.groups))
            and bool({"*", resource} & set(self.resources))
            and (not self.names or access.name in self.names)
            and (not self.namespaces or access.namespace in self.namespaces)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class User:
    """Without rules, one who may do everything."""

    name: str
    rules: tuple[Rule, ...] | None = None

    def may(self, access: "Access") -> bool:
        return self.rules is None or any(rule.allows(access) for rule in self.rules)


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """What a request wants to do, in RBAC's words."""

    verb: str
    group: str = ""
    resource: str
    subresource: str = ""
    namespace: str = ""
    name: str = ""

    def refused(self, user: str) -> StatusError:
        what = "/".join(filter(None, (self.resource, self.subresource)))
        where = f'in the namespace "{self.namespace}"' if self.namespace else "at the cluster scope"
        of = f"{self.resource}.{self.group}" if self.group else self.resource
        whom = f'{of} "{self.name}"' if self.name else of
        return StatusError(
            403,
            "Forbidden",
            f'{whom} is forbidden: User "{user}" cannot {self.verb} resource "{what}" in API group '
            f'"{self.group}" {where}',
            name=self.name,
            group=self.group,
            kind=self.resource,
        )


ADMIN = User(name="kubernetes-admin")
